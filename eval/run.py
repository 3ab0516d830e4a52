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
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from distill.provenance import collect
from distill.recipe import Recipe, dump, load_recipe
from eval.records import BASELINE, LOOKUP, append_rows, read_rows
from eval.report import build_report, terminal_table, write_report

if TYPE_CHECKING:
    from eval.measure import Bench, EvalRequest

log = logging.getLogger(__name__)
console = Console(stderr=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(prog="python -m eval.run", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a recipe, such as recipes/code.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--draft", action="append", type=Path, metavar="DIR", help="draft folder (default: the latest)")
    parser.add_argument("--out", type=Path, help="evaluation folder (default: eval/ beside the first draft)")
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
        if args.check:
            from distill.checkpoint import read_draft

            for path in names.values():
                read_draft(path)
            print(dump(recipe))  # noqa: T201 - the answer to --check
            return 0
        report, folder = evaluate(recipe, names, args.out)
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
        if name in names or name in (BASELINE, LOOKUP):
            raise ValueError(f"two drafts would be called {name!r}; rename one folder")
        names[name] = folder
    return names


def evaluate(recipe: Recipe, drafts: dict[str, Path], out: Path | None = None) -> tuple[dict[str, Any], Path]:
    """Measures the drafts of a recipe and writes the report.

    Args:
        recipe: its target, traffic.heldout and eval stages count.
        drafts: folders by name.
        out: evaluation folder; None makes eval/<time> beside the first draft.

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
    from eval.setup import costs_of, requests_of, set_up

    bench, tokenizer, meta = set_up(recipe, drafts)
    requests = requests_of(recipe, tokenizer)
    plan = costs_of(recipe, bench)
    provenance = collect(recipe.seed, str(bench.target.device))
    settings = {
        **recipe.eval.model_dump(mode="json"),
        "domain": recipe.traffic.domain,
        "dtype": recipe.target.dtype,
        "seed": recipe.seed,
        "target": recipe.target.model,
        **meta,
    }
    _write_json(
        out / "run.json",
        {"recipe": json.loads(dump(recipe)), "settings": settings, "plan": plan, "provenance": provenance},
    )
    _measure(recipe, bench, requests, rows_path)
    report = build_report(read_rows(rows_path), plan, provenance, settings)
    write_report(out, report)
    return report, out


def _measure(recipe: Recipe, bench: Bench, requests: Sequence[EvalRequest], path: Path) -> None:
    """All rows of all arms, with a progress bar."""
    from eval.measure import Arm

    arms = [Arm("", 0)]
    arms += [Arm(name, k) for name in bench.drafts for k in recipe.eval.k]
    if recipe.eval.lookup:
        arms += [Arm(LOOKUP, k) for k in recipe.eval.k if k == max(recipe.eval.k)]
    total = len(requests) + recipe.eval.warmup
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"measuring {len(arms)} arms", total=total)
        seen: str | None = None
        for row in bench.measure(requests, arms, recipe.eval.warmup, recipe.eval.phased_every):
            append_rows(path, [row])
            key = f"{row.warmup} {row.request_id}"
            if seen not in (None, key):
                progress.advance(task)
            seen = key
        progress.advance(task)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
