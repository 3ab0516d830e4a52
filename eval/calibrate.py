"""python -m eval.calibrate RECIPE --to FILE [key=value ...]: how far the roofline is off on this device.

The device's own rates (copy bandwidth, a bf16 product, one small operation) go into the same roofline that predicts
other devices from a table; the recipe's target and draft are measured beside it. What the roofline misses is given for
a baseline step, for verify passes and for draft steps. The ratios of the last two to the first are what `eval.plan
--device-table` multiplies with: a share of a GPU's peak can not be learnt here, but which steps fall short of a
roofline by more than others can.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from distill.devices import Device
from distill.files import write_json
from distill.models import load_model
from distill.provenance import collect
from distill.recipe import Recipe, load_recipe
from distill.roofline import predict_costs
from distill.shape import blank_factors, find_target
from engine.bench import copy_bandwidth, measure_costs, times_ms
from engine.costs import Costs
from engine.model import Runner
from eval.entry import guarded
from eval.plan import shapes_of as built_shapes
from eval.plan_table import shapes_of, target_sizes
from eval.plan_view import CONTEXTS
from eval.setup import device_of

log = logging.getLogger("eval.calibrate")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, writes the calibration."""
    parser = argparse.ArgumentParser(prog="python -m eval.calibrate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", help="a recipe whose target is here, such as recipes/code.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="where the calibration goes")
    args = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    def work() -> int:
        # Predictions count bf16, whatever this machine would serve in.
        recipe = load_recipe(args.recipe, ["target.dtype=bfloat16", *args.overrides])
        found = calibrate(recipe, *measure(recipe))
        args.to.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.to, found)
        log.info("measured over predicted: %s", json.dumps(found["measured_over_predicted"]))
        log.info("factors for other devices: %s", json.dumps(found["factors"]))
        return 0

    return guarded(work)


def measure(recipe: Recipe) -> tuple[list[Costs], Device]:
    """Costs of the recipe's own shape at batch 1, and the device's rates before and after them (the mean of both).

    Args:
        recipe: target, draft shape (of a race, the first) and draft lengths; the draft has random weights.
    """
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device = device_of(recipe)
    found = find_target(recipe)
    target = load_model(found.folder, recipe.target.dtype, device)
    name, config, rows, rank = built_shapes(recipe, found.config)[0]
    with torch.device(device):
        draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype).eval()
    capacity = max(CONTEXTS) + 200
    shortlist = None if rows is None else torch.arange(rows)
    runners = (
        Runner(target, 1, capacity),
        Runner(draft, 1, capacity, shortlist, factors=blank_factors(config, rank)),
    )
    before = this_device(device)
    costs = measure_costs(*runners, recipe.eval.k, CONTEXTS, name=name)
    after = this_device(device)
    return costs, replace(
        before,
        bandwidth=(before.bandwidth + after.bandwidth) / 2,
        flops=(before.flops + after.flops) / 2,
        launch_ms=(before.launch_ms + after.launch_ms) / 2,
        replay_ms=(before.replay_ms + after.replay_ms) / 2,
    )


def this_device(device: str) -> Device:
    """The rates of the device that is here, measured; nothing is taken off them.

    Args:
        device: cpu or cuda.
    """
    size = 1024 if device == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = statistics.median(times_ms(lambda: a @ b, a.device, 9))
    # A chain of small operations, as norms and rotary embeddings are: [1, 1, 1024] numbers.
    x = torch.ones(1, 1, 1024, device=device).bfloat16()

    def small() -> None:
        y = x
        for _ in range(100):
            y = y * x

    one = statistics.median(times_ms(small, x.device, 9)) / 100
    return Device(
        "this device",
        memory_bytes=float("inf"),
        bandwidth=copy_bandwidth(device),
        flops=2e3 * size**3 / product,
        link=float("inf"),
        bandwidth_frac=1.0,
        compute_frac=1.0,
        train_frac=1.0,
        launch_ms=one,
        replay_ms=one,
        host_ms=0.0,
    )


def calibrate(recipe: Recipe, costs: Sequence[Costs], device: Device) -> dict[str, Any]:
    """Measured costs of the recipe's shape beside predicted ones.

    Args:
        recipe: the one that was measured.
        costs: of its own shape.
        device: with the rates of the device that they were measured on.

    Returns:
        the rates, every load measured and predicted, `measured_over_predicted` for baseline steps, verify passes and
        draft steps (medians over loads and draft lengths), and `factors`, the last two over the first.
    """
    target = target_sizes(recipe)
    name, config, head = shapes_of(recipe, target)[0]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = {"baseline": [], "verify": [], "draft": []}
    for measured in costs:
        told = predict_costs(device, target, config, head, max(measured.V_ms), measured.context, measured.batch, name)
        rows.append({"context": measured.context, "batch": measured.batch} | {
            key: {"measured_ms": ours, "predicted_ms": theirs}
            for key, ours, theirs in (
                ("T", measured.T_ms, told.T_ms), ("t", measured.t_ms, told.t_ms),
                *((f"V({k})", measured.V_ms[k], told.V_ms[k]) for k in measured.V_ms),
            )
        })  # fmt: skip
        ratios["baseline"].append(measured.V_ms[0] / told.V_ms[0])
        ratios["draft"].append(measured.t_ms / told.t_ms)
        ratios["verify"] += [measured.V_ms[k] / told.V_ms[k] for k in measured.ks]
    over = {key: statistics.median(values) for key, values in ratios.items()}
    facts = collect(0)
    return {
        "format": 1,
        "target": recipe.target.model,
        "recipe": recipe.name,
        "device": torch.cuda.get_device_name() if device_of(recipe) == "cuda" else facts["cpu"],
        "num_threads": torch.get_num_threads(),
        "dtype": recipe.target.dtype,
        "time": facts["time"],
        "rates": {
            "copy_gb_s": device.bandwidth / 1e9,
            "bf16_tflops": device.flops / 1e12,
            "small_operation_us": 1e3 * device.replay_ms,
        },
        "measured_over_predicted": over,
        "factors": {key: over[key] / over["baseline"] for key in ("verify", "draft")},
        "loads": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
