"""python -m eval.plan RECIPE [key=value ...]: would a draft pay here, and which shape? Measured before any training.

The target is the real one; the drafts have random weights, because time does not depend on them. For each shape and k
it prints the acceptance at which speculation breaks even, the tokens per cycle that 1.25x, 1.5x and 2x need, and the
ceiling. With eval.simulate requests are decoded at that acceptance, to check what is predicted. plan.json goes to
OUTPUT_DIR/NAME/plan.json. With --device-table nothing is measured or loaded: all of it is predicted for GPUs that are
not here, from their published peaks, and says so. With --race FILE shapes of 1 to 6 layers within the recipe's bounds
are timed (or predicted), and FILE becomes the recipe of a race of the best of them, with a control.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from distill.devices import Device, find_device, read_devices
from distill.files import read_object, write_json
from distill.published import DEVICES
from distill.recipe import Recipe, dump, load_recipe
from engine import costs as model
from engine.costs import Costs
from eval.entry import guarded, table_console, talk, whole
from eval.plan_race import check_race, measure_race, predict_race, race_table, write_race
from eval.plan_table import CALIBRATION, predict_plan, read_factors, table_of
from eval.plan_view import CONTEXTS, case_of_plan, load_table, tables, verdict, what_if_table
from eval.simulated import check_table
from eval.whatif import Question, parse

log = logging.getLogger(__name__)
console = Console(stderr=True)

# Loads at which the recipe's own shape (of a race, its first) is measured too: longer contexts at batch 1, more rows at
# the shortest.
LONG_CONTEXTS = (2048, 8192)
BATCHES = (4, 16)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints the plan."""
    parser = argparse.ArgumentParser(prog="python -m eval.plan", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a recipe, such as recipes/code.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    ask = "ask the cost model: draft=0.5 | alpha=0.8,k=4 | batch=16,context=8192 (may be repeated)"
    parser.add_argument("--what-if", action="append", default=[], metavar="NAME=VALUE,...", help=ask)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan.json to read in place of measuring")
    table = "predict from a device table, such as distill/published/devices.json; no weights are needed"
    parser.add_argument("--device-table", type=Path, metavar="FILE", help=table)
    one = "the device of the table to say all about; by default trainer.gpu, else the table's first"
    parser.add_argument("--gpu", metavar="NAME", help=one)
    given = "what python -m eval.calibrate wrote: how far the prediction is off on a device that is here"
    parser.add_argument("--calibration", type=Path, metavar="FILE", default=CALIBRATION, help=given)
    race = "write the recipe as a race of the best shapes within its bounds and a control of 1-2%%; no plan.json"
    parser.add_argument("--race", type=Path, metavar="FILE", help=race)
    parser.add_argument("--check", action="store_true", help="check the recipe, measure nothing")
    args = parser.parse_intermixed_args(argv)
    if not args.recipe or ("=" in args.recipe and not Path(args.recipe).exists()):
        parser.error("a recipe is needed, for example recipes/code.yaml")
    talk(console)
    return guarded(lambda: _work(args))


def _work(args: argparse.Namespace) -> int:
    """What the command line asks for; the exit code."""
    recipe = load_recipe(args.recipe, args.overrides)
    if args.gpu and not args.device_table:
        raise ValueError(f"--gpu {args.gpu}: names a device of a table; give --device-table {DEVICES} too")
    if args.race:
        if args.plan or args.what_if:
            given = "--plan" if args.plan else "--what-if"
            raise ValueError(f"--race times the shapes of its own; drop {given}, or ask in a call of its own")
        check_race(recipe, args.race)
    if args.check:
        print(dump(recipe))  # noqa: T201 - the answer to --check
        return 0
    if args.race:
        return _race(args, recipe)
    questions = [parse(text) for text in args.what_if]
    if args.plan:
        with whole(args.plan, "plan"):
            _show(read_plan(args.plan), questions, recipe)
        return 0
    others: list[dict[str, Any]] = []
    if args.device_table:
        plan, others = predict_plans(recipe, args.device_table, args.gpu, args.calibration)
    else:
        plan = measure_plan(recipe)
    path = _write(recipe, plan)
    _show(plan, questions, recipe, others)
    console.print(f"plan: {path}", highlight=False)
    return 0


def _race(args: argparse.Namespace, recipe: Recipe) -> int:
    """Times or predicts the shapes of a race and writes its recipe; the exit code."""
    if args.device_table:
        devices, factors = read_devices(args.device_table), read_factors(args.calibration)
        shapes, costs, where = predict_race(recipe, _device(recipe, devices, args.gpu), factors)
    else:
        shapes, costs, where = measure_race(recipe)
    chosen, control = write_race(recipe, args.race, shapes, costs, where)
    table_console().print(race_table(chosen, control, where))
    perfect = max(model.predicted_speedup(one, k, 1.0) for one in costs for k in recipe.eval.k)
    if perfect < recipe.eval.min_speedup:
        wanted = recipe.eval.min_speedup
        log.warning("do not train: even a perfect draft gives %.2fx here (asked for %.2fx)", perfect, wanted)
    console.print(f"race: {args.race}; look at it: python -m distill.train {args.race} --check", highlight=False)
    return 0


def _device(recipe: Recipe, devices: Mapping[str, Device], gpu: str | None) -> Device:
    """The device of the table that all is said about: the one asked for, else trainer.gpu, else the first."""
    name = gpu or recipe.trainer.gpu or next(iter(devices))
    return find_device(name, devices, "--gpu" if gpu else "trainer.gpu")


def _show(
    plan: dict[str, Any], questions: Sequence[Question], recipe: Recipe, others: Sequence[dict[str, Any]] = ()
) -> None:
    """Other devices' plans in a line each, the plan's own tables, then the answers, then one line of advice."""
    case = case_of_plan(plan, recipe.eval.max_new_tok)
    found = [table_of(others, recipe.eval.min_speedup)] if others else []
    found += [*tables(plan), load_table(case, bool(plan.get("predicted")))]
    found += [check_table(plan["simulated"])] if plan.get("simulated") else []
    found += [what_if_table(case, questions)] if questions else []
    advice = verdict(plan, recipe.eval.min_speedup)
    out = table_console()
    for table in found:
        out.print(table)
    out.print(advice, highlight=False)


def _write(recipe: Recipe, plan: dict[str, Any]) -> Path:
    """plan.json beside the recipe's runs, whole or not at all; a predicted one has its device in its name."""
    name = f"plan-{plan['device']}-predicted.json" if plan.get("predicted") else "plan.json"
    path = Path(recipe.output_dir) / recipe.name / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, plan)
    return path


def read_plan(path: Path) -> dict[str, Any]:
    """A plan that was measured before.

    Raises:
        ValueError: no plan of this command.
    """
    remedy = "; give the plan.json that python -m eval.plan wrote"
    plan = read_object(path, ValueError, "plan", "--plan ", remedy)
    if not {"costs", "shapes", "device"} <= set(plan):
        raise ValueError(f"--plan {path}: no plan{remedy}")
    return plan


def predict_plans(
    recipe: Recipe, table: Path, gpu: str | None, calibration: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plan for one device of a table, and the plans for all of them.

    Args:
        recipe: its target and draft shape.
        table: the device table.
        gpu: the one; None is trainer.gpu, else the table's first.
        calibration: see `eval.calibrate`.

    Raises:
        ValueError: a table, a device or sizes that are not there.
    """
    devices, factors = read_devices(table), read_factors(calibration)
    chosen = _device(recipe, devices, gpu)
    plans = {device.name: predict_plan(recipe, device, factors) for device in devices.values()}
    return plans[chosen.name], list(plans.values())


def measure_plan(recipe: Recipe) -> dict[str, Any]:
    """Costs of the recipe's draft shape and of some others, on this device.

    Args:
        recipe: target, draft shape and draft lengths.

    Returns:
        plan.json: device, target, shapes with both sizes, costs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from distill.models import load_model
    from distill.shape import blank_factors, draft_size, find_target
    from engine.bench import copy_bandwidth, measure_costs
    from engine.model import Runner
    from eval.setup import device_of
    from eval.untrained import untrained

    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device, dtype = device_of(recipe), getattr(torch, recipe.target.dtype)
    found = find_target(recipe)
    target = load_model(found.folder, recipe.target.dtype, device)
    capacity = max(CONTEXTS) + 200
    runner = Runner(target, 1, capacity)
    costs: list[Costs] = []
    shapes: list[dict[str, Any]] = []
    simulated: dict[str, Any] | None = None
    for name, config, head_rows, rank in shapes_of(recipe, found.config):
        with torch.device(device):
            draft = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        shortlist = None if head_rows is None else torch.arange(head_rows)
        size, factors = draft_size(config, head_rows, rank), blank_factors(config, rank)
        log.info("measuring %s (%.1f M read a token)", name, size.read / 1e6)
        small = Runner(draft, 1, capacity, shortlist, factors=factors)
        costs += measure_costs(runner, small, recipe.eval.k, CONTEXTS, name=name)
        if not shapes:
            room = found.config.max_position_embeddings
            for contexts, batch in loads_of(recipe, room):
                log.info("measuring %s at batch %d, contexts %s", name, batch, ", ".join(map(str, contexts)))
                wide = max(contexts) + 200
                rows = Runner(target, batch, wide), Runner(draft, batch, wide, shortlist, factors=factors)
                costs += measure_costs(*rows, recipe.eval.k, contexts, batch, name=name)
            if recipe.eval.simulate:
                log.info("decoding at simulated acceptance")
                simulated = untrained(recipe, runner, small, name, costs)
        shapes.append(
            {
                "name": name,
                "stored_frac": size.stored / found.size.stored,
                "read_frac": size.read / found.size.read,
                "layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "head_rows": head_rows or config.vocab_size,
            }
        )
    return {
        "format": 1,
        "device": device,
        "num_threads": torch.get_num_threads(),
        "dtype": recipe.target.dtype,
        "target": recipe.target.model,
        "bandwidth_bytes_per_s": copy_bandwidth(device),
        "shapes": shapes,
        "costs": [c.to_json() for c in costs],
        "simulated": simulated,
    }


def loads_of(recipe: Recipe, room: int) -> list[tuple[list[int], int]]:
    """(contexts, batch) at which the recipe's shape is measured beside the short contexts at batch 1.

    Args:
        recipe: its eval.batches are measured too.
        room: positions of the target.
    """
    longer = sorted(c for c in {min(c, room - 200) for c in LONG_CONTEXTS} if c > max(CONTEXTS))
    batches = sorted({*BATCHES, *recipe.eval.batches} - {1})
    return [(longer, 1)] * bool(longer) + [([min(CONTEXTS)], batch) for batch in batches]


def shapes_of(recipe: Recipe, config: Any) -> list[tuple[str, Any, int | None, int | None]]:
    """(name, config, head rows, rank of the head) of the recipe's draft and of its neighbours in depth and head.

    Args:
        recipe: its draft stage, at the shape that its rounds end with; a pretrained draft has its own config and no
            neighbours; a race gives its candidates.
        config: the target's.
    """
    from distill.prune import layer_plan, pruned_config
    from distill.shape import draft_config

    stage, rows, rank = recipe.draft, recipe.draft.head.size, recipe.draft.head.rank
    if stage.candidates is not None:
        alone = [recipe.model_copy(update={"draft": draft}) for draft in stage.candidates]
        return [(f"candidate {n}", *shapes_of(one, config)[0][1:]) for n, one in enumerate(alone)]
    own = draft_config(recipe, config)
    found = [("recipe", own, rows, rank)]
    if stage.kind == "pretrained":
        return found
    widths = (own.hidden_size, own.intermediate_size, own.num_key_value_heads)
    for depth in sorted({1, 2, 4, config.num_hidden_layers // 2} - {own.num_hidden_layers}):
        kept = layer_plan(config.num_hidden_layers, None, depth)
        found.append(
            (f"{depth} layer{'s' * (depth > 1)}", pruned_config(config, kept, *widths, stage.untie_head), rows, rank)
        )
    if rows is not None or rank is not None:
        found.append(("whole head", own, None, None))
    return found


if __name__ == "__main__":
    sys.exit(main())
