"""python -m eval.plan RECIPE [key=value ...]: would a draft pay here, and which shape? Measured before any training.

The target is the real one; the drafts have random weights, because time does not depend on them. For each shape and k
it prints the acceptance at which speculation breaks even, the tokens per cycle that 1.25x, 1.5x and 2x need, and the
ceiling. plan.json goes to OUTPUT_DIR/NAME/plan.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from distill.recipe import Recipe, dump, load_recipe
from engine import costs as model
from engine.costs import Costs

log = logging.getLogger(__name__)
console = Console(stderr=True)

SPEEDUPS = (1.25, 1.5, 2.0)
CONTEXTS = (128, 512)
# What public results make plausible, not a measurement: T5-small drafting for T5-XXL was accepted at 0.53 to 0.75
# over two tasks and two temperatures (arXiv 2211.17192, table 2).
PLAUSIBLE_ALPHA = (0.5, 0.7)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints the plan."""
    parser = argparse.ArgumentParser(prog="python -m eval.plan", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a recipe, such as recipes/code.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--check", action="store_true", help="check the recipe, measure nothing")
    args = parser.parse_intermixed_args(argv)
    if not args.recipe or ("=" in args.recipe and not Path(args.recipe).exists()):
        parser.error("a recipe is needed, for example recipes/code.yaml")
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        if args.check:
            print(dump(recipe))  # noqa: T201 - the answer to --check
            return 0
        plan = measure_plan(recipe)
        path = Path(recipe.output_dir) / recipe.name / "plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(".plan.json.tmp")
        temporary.write_text(json.dumps(plan, indent=2), encoding="utf-8")
        os.replace(temporary, path)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        return 2
    out = Console()
    for table in tables(plan):
        out.print(table)
    out.print(verdict(plan, recipe.eval.min_speedup), highlight=False)
    console.print(f"plan: {path}", highlight=False)
    return 0


def measure_plan(recipe: Recipe) -> dict[str, Any]:
    """Costs of the recipe's draft shape and of some others, on this device.

    Args:
        recipe: target, draft shape and draft lengths.

    Returns:
        plan.json: device, target, shapes with both sizes, costs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from distill.models import load_model, param_counts
    from distill.shape import find_target
    from engine.bench import copy_bandwidth, measure_costs
    from engine.model import Runner
    from eval.setup import device_of

    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device, dtype = device_of(recipe), getattr(torch, recipe.target.dtype)
    found = find_target(recipe)
    target = load_model(found.folder, recipe.target.dtype, device)
    capacity = max(CONTEXTS) + 200
    runner = Runner(target, 1, capacity)
    costs, shapes = [], []
    for name, config, head_rows in shapes_of(recipe, found.config):
        with torch.device(device):
            draft = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        shortlist = None if head_rows is None else torch.arange(head_rows)
        size = param_counts(config, head_rows)
        log.info("measuring %s (%.1f M read a token)", name, size.read / 1e6)
        costs += measure_costs(runner, Runner(draft, 1, capacity, shortlist), recipe.eval.k, CONTEXTS, name=name)
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
    }


def shapes_of(recipe: Recipe, config: Any) -> list[tuple[str, Any, int | None]]:
    """(name, config, head rows) of the recipe's draft and of its neighbours in depth and head.

    Args:
        recipe: its draft stage; a pretrained draft has its own config and no neighbours; a race gives its candidates.
        config: the target's.
    """
    from distill.models import load_config
    from distill.prune import layer_plan, pruned_config

    stage, rows = recipe.draft, recipe.draft.head.size
    if stage.candidates is not None:
        alone = [recipe.model_copy(update={"draft": draft}) for draft in stage.candidates]
        return [(f"candidate {n}", *shapes_of(one, config)[0][1:]) for n, one in enumerate(alone)]
    if stage.kind == "pretrained":
        assert stage.model is not None
        return [("recipe", load_config(stage.model), rows)]
    layers = layer_plan(config.num_hidden_layers, stage.layers, stage.num_layers)
    widths = (stage.hidden_size, stage.intermediate_size, stage.num_kv_heads)
    found = [("recipe", pruned_config(config, layers, *widths), rows)]
    for depth in sorted({1, 2, 4, config.num_hidden_layers // 2} - {len(layers)}):
        kept = layer_plan(config.num_hidden_layers, None, depth)
        found.append((f"{depth} layer{'s' * (depth > 1)}", pruned_config(config, kept, *widths), rows))
    if rows is not None:
        found.append(("whole head", pruned_config(config, layers, *widths), None))
    return found


def tables(plan: dict[str, Any]) -> list[Table]:
    """One table of shapes, and for each shape one of draft lengths, at the shortest context."""
    costs = [Costs.from_json(c) for c in plan["costs"]]
    overview = Table(
        title=f"Draft shapes on {plan['device']} ({plan['num_threads']} threads, {plan['dtype']}), batch 1"
    )
    for column in ("shape", "stored", "read", "context", "T ms", "t ms", "V(1) ms", "ceiling", "P ms (fit/diff/bytes)"):
        overview.add_column(column, justify="left" if column == "shape" else "right")
    sizes = {shape["name"]: shape for shape in plan["shapes"]}
    for c in costs:
        shape, kv = sizes[c.draft], c.prefix_kv_ms or {}
        overview.add_row(
            c.draft,
            f"{shape['stored_frac']:.1%}",
            f"{shape['read_frac']:.1%}",
            str(c.context),
            f"{c.T_ms:.2f}",
            f"{c.t_ms:.2f}",
            f"{model.verify_ms(c, 1):.2f}",
            f"{model.ceiling(c).speedup:.2f}x",
            " / ".join(f"{kv[name]:.2f}" for name in ("fit", "difference", "bandwidth")),
        )
    found = [overview]
    for c in (c for c in costs if c.context == min(CONTEXTS)):
        table = Table(title=f"{c.draft}: what k proposals need (context {c.context})")
        alphas = (*PLAUSIBLE_ALPHA, 1.0)
        heads = (
            "k",
            "cycle ms",
            "break-even alpha",
            *(f"tau for {s:g}x" for s in SPEEDUPS),
            *(f"alpha {alpha:g}" for alpha in alphas),
        )
        for head in heads:
            table.add_column(head, justify="right")
        for k in c.ks:
            even = model.break_even_alpha(c, k)
            needed = [model.needed_tau(c, k, s) for s in SPEEDUPS]
            table.add_row(
                str(k),
                f"{model.cycle_ms(c, k):.1f}",
                "never" if even is None else f"{even:.2f}",
                *("never" if tau is None else f"{tau:.2f}" for tau in needed),
                *(f"{model.predicted_speedup(c, k, alpha):.2f}x" for alpha in alphas),
            )
        found.append(table)
    return found


def verdict(plan: dict[str, Any], min_speedup: float) -> str:
    """One line: train this shape, another one, or none.

    Args:
        plan: plan.json.
        min_speedup: what the recipe asks for.
    """
    costs = [Costs.from_json(c) for c in plan["costs"] if c["context"] == min(CONTEXTS)]
    perfect = {c.draft: max(model.predicted_speedup(c, k, 1.0) for k in c.ks) for c in costs}
    likely = {c.draft: max(model.predicted_speedup(c, k, PLAUSIBLE_ALPHA[0]) for k in c.ks) for c in costs}
    best = max(perfect, key=lambda name: perfect[name])
    if perfect[best] < min_speedup:
        return f"Do not train: even a perfect draft gives {perfect[best]:.2f}x here (asked for {min_speedup:.2f}x)."
    other = max(likely, key=lambda name: likely[name])
    if "recipe" not in likely:
        return (
            f"At alpha {PLAUSIBLE_ALPHA[0]} for all of them '{other}' is fastest ({likely[other]:.2f}x), at most "
            f"{perfect[other]:.2f}x; they will not accept alike, so race them."
        )
    own = likely["recipe"]
    text = (
        f"The recipe's shape gives {own:.2f}x at alpha {PLAUSIBLE_ALPHA[0]} and at most {perfect['recipe']:.2f}x. "
        f"At that alpha the fastest shape is '{other}' ({likely[other]:.2f}x); a smaller draft accepts less, so "
        "train both before believing it."
    )
    return text if own >= min_speedup else f"Doubtful: {text}"


if __name__ == "__main__":
    sys.exit(main())
