"""python -m eval.run RECIPE [key=value ...] [--draft DIR ...]: real speculative decoding on held-out traffic.

Rows go to requests.jsonl as they are measured; the report is made of the rows alone, so it can be made again.
Exit code 0: go, or no gate was asked for; 1: no-go with --gate; 2: bad input; 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from distill.provenance import collect
from distill.recipe import Recipe, dump, load_recipe
from eval.against import before_after, read_earlier
from eval.budget import Budget
from eval.cells import Settings
from eval.race import Race
from eval.records import BASELINE, LOOKUP, SELF
from eval.report import build_report, terminal_table, write_report
from eval.rowfile import append_rows, read_rows

if TYPE_CHECKING:
    from eval.arms import Arm
    from eval.measure import Bench, EvalRequest
    from eval.setup import Traffic

log = logging.getLogger(__name__)
console = Console(stderr=True)

# Sets of a cell that are measured whatever the budget: fewer have no interval.
MIN_SETS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(prog="python -m eval.run", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a recipe, such as recipes/code.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--draft", action="append", type=Path, metavar="DIR", help="draft folder (default: the latest)")
    parser.add_argument("--out", type=Path, help="evaluation folder (default: eval/ beside the first draft)")
    parser.add_argument("--against", type=Path, metavar="REPORT", help="an earlier report.json to set beside")
    parser.add_argument("--gate", action="store_true", help="exit 1 when the verdict is no-go")
    parser.add_argument("--check", action="store_true", help="check the recipe and the draft folders, measure nothing")
    args = parser.parse_intermixed_args(argv)
    if not args.recipe or ("=" in args.recipe and not Path(args.recipe).exists()):
        parser.error("a recipe is needed, for example recipes/code.yaml")
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        folders = args.draft or [Path(recipe.output_dir) / recipe.name / "latest" / "draft"]
        names = draft_names(folders)
        earlier = read_earlier(args.against) if args.against else None
        if args.check:
            from distill.checkpoint import read_draft

            for path in names.values():
                read_draft(path)
            print(dump(recipe))  # noqa: T201 - the answer to --check
            return 0
        report, folder = evaluate(recipe, names, args.out, earlier)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; rows measured so far are kept, no report was written", style="bold red")
        return 130
    console.print(terminal_table(report))
    console.print(f"report: {folder / 'report.html'}", highlight=False)
    return 1 if args.gate and not report["verdict"]["go"] else 0


def draft_names(folders: Sequence[Path]) -> dict[str, Path]:
    """A short name for each draft folder: its own name, or the recipe's for the usual `.../draft`.

    Raises:
        ValueError: a folder is no finished draft, or is given twice.
    """
    names: dict[str, Path] = {}
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} is no finished draft (it has no config.json); train one with "
                "`python -m distill.train RECIPE`, or name another with --draft"
            )
        real = folder.resolve()
        if real in (p.resolve() for p in names.values()):
            raise ValueError(f"--draft {folder} is given twice")
        name = real.name if real.name != "draft" else f"{real.parent.parent.name}-{real.parent.name}"
        if real.name == "draft" and len(folders) == 1:
            name = real.parent.parent.name
        if name in names or name in (BASELINE, LOOKUP) or name.startswith(SELF):
            raise ValueError(
                f"{folder} would be called {name!r}, which is another draft's name or a control's; rename the folder"
            )
        names[name] = folder
    return names


def evaluate(
    recipe: Recipe, drafts: dict[str, Path], out: Path | None = None, earlier: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Path]:
    """Measures the drafts of a recipe and writes the report.

    Args:
        recipe: its target, traffic.heldout and eval stages count.
        drafts: folders by name.
        out: evaluation folder; None makes eval/<time> beside the first draft.
        earlier: a report to set beside this one.

    Returns:
        the report and its folder.

    Raises:
        ValueError: a draft that does not fit the target, or no held-out prompts.
    """
    if out is None:
        out = next(iter(drafts.values())).resolve().parent / "eval" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    rows_path = out / "requests.jsonl"
    if rows_path.exists():
        raise ValueError(f"{rows_path} holds rows of an earlier evaluation; give another --out")
    from eval.setup import costs_of, set_up

    bench, traffic, meta = set_up(recipe, drafts)
    plan = {**costs_of(recipe, bench, traffic.requests), "memory": meta.pop("memory")}
    arms, plan["trees"] = _arms(recipe, bench, traffic, list(drafts))
    provenance = collect(recipe.seed, str(bench.target.device))
    settings = {
        **recipe.eval.model_dump(mode="json"),
        "domain": recipe.traffic.domain,
        "dtype": recipe.target.dtype,
        "seed": recipe.seed,
        "target": recipe.target.model,
        **meta,
    }
    run = {"recipe": json.loads(dump(recipe)), "settings": settings, "plan": plan, "provenance": provenance}
    _write_json(out / "run.json", run)
    settings |= _measure(recipe, bench, traffic.requests, arms, rows_path)
    _write_json(out / "run.json", run)
    report = build_report(read_rows(rows_path), plan, provenance, settings)
    if earlier is not None:
        try:
            report["against"] = before_after(earlier, report)
        except ValueError as fault:
            # Hours of rows are worth a report without this one figure.
            log.warning("no before and after: %s", fault)
    write_report(out, report)
    return report, out


def _arms(
    recipe: Recipe, bench: Bench, traffic: Traffic, drafts: Sequence[str]
) -> tuple[list[Arm], list[dict[str, Any]]]:
    """All arms, the trees that win among them, and what was found out about trees."""
    from eval.arms import grid

    arms, stage, about = grid(recipe.eval, drafts), recipe.eval, []
    if stage.tree_nodes is not None:
        from eval.trees import find_tree

        typical = median(len(r.ids) for r in traffic.requests) + stage.max_new_tok / 2
        for name in drafts:
            costs = [c for c in bench.costs if (c.draft, c.batch) == (name, 1)]
            nearest = min(costs, key=lambda c: abs(c.context - typical))
            found = find_tree(bench, name, traffic.spare, nearest, stage.k, stage.tree_nodes)
            arms += [] if found.arm is None else [found.arm]
            about.append(found.about)
    return arms, about


def _measure(
    recipe: Recipe, bench: Bench, requests: Sequence[EvalRequest], arms: Sequence[Arm], path: Path
) -> dict[str, Any]:
    """All rows of all arms, batch by batch, with a progress bar; what became of the budget and of the race."""
    from eval.setup import sets_of

    stage = recipe.eval
    budget, least = Budget(stage.budget_min, len(stage.batches)), Settings.of(stage.model_dump()).needed
    race = Race(len(requests)) if stage.race else None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for batch in sorted(stage.batches):
            # Trees are known to win at batch 1 alone.
            mine = [arm for arm in arms if batch == 1 or arm.tree is None]
            budget.open()
            if batch == 1:
                total, rows = (
                    len(requests),
                    bench.measure(
                        requests,
                        mine,
                        stage.warmup,
                        stage.phased_every,
                        lambda r: budget.takes(r.domain, r.group, least),
                        None if race is None else lambda arm: race.keeps(arm.name),
                    ),
                )
            else:
                sets = sets_of(requests, batch, stage.batch_sets)
                total, rows = (
                    len(sets),
                    bench.measure_sets(
                        sets,
                        mine,
                        batch,
                        stage.warmup,
                        stage.phased_every,
                        lambda s: budget.takes(s.requests[0].domain, s.requests[0].group, MIN_SETS),
                    ),
                )
            task = progress.add_task(f"batch {batch}: {len(mine)} arms", total=total + stage.warmup)
            seen: str | None = None
            for row in rows:
                append_rows(path, [row])
                if race is not None and batch == 1:
                    race.add(row)
                key = f"{row.warmup} {row.request_id if batch == 1 else row.set}"
                if seen not in (None, key):
                    progress.advance(task)
                seen = key
            progress.advance(task)
    if budget.skipped:
        left = ", ".join(f"{num} of {cell}" for cell, num in budget.skipped.items())
        log.warning("eval.budget_min = %s is used; not measured: %s", stage.budget_min, left)
    elif stage.budget_min is not None and budget.to_json()["used_min"] > stage.budget_min:
        log.warning("eval.budget_min = %s did not hold the requests that every cell needs", stage.budget_min)
    if race is not None and race.dropped:
        log.info("clearly behind and dropped after %d requests: %s", race.after, ", ".join(race.dropped))
    return {"budget": budget.to_json(), "raced": None if race is None else race.to_json()}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
