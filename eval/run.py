"""python -m eval.run RECIPE [key=value ...] [--draft DIR ...] [--resume DIR]: real decoding of held-out traffic.

Rows go to requests.jsonl as they are measured; the report is made of the rows alone, and report.json comes last. What
was stopped goes on with --resume, behind the last request that was measured whole.
Exit code 0: go, or no gate was asked for; 1: no-go with --gate; 2: bad input, or the disk is full; 130 or 143: SIGINT
or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from distill.locks import try_lock
from distill.provenance import collect
from distill.recipe import Recipe, dump, load_recipe
from distill.runs import Interrupted, Stop
from distill.track import TrackError
from eval.against import before_after, read_earlier
from eval.arms import grid
from eval.copies import copy_report
from eval.entry import console as say
from eval.entry import guarded, talk, whole
from eval.gate import SIMULATED
from eval.records import BASELINE, LOOKUP, SELF
from eval.report import build_report, terminal_table, write_report
from eval.resume import (
    REPORT,
    ROWS,
    RUN,
    Stopped,
    check_same,
    find_stopped,
    keep_whole,
    recipe_of,
    requests_sha256,
    write_json,
)
from eval.rowfile import read_rows

log = logging.getLogger(__name__)
console = Console(stderr=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, reports."""
    parser = argparse.ArgumentParser(prog="python -m eval.run", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a recipe, such as recipes/code.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--draft", action="append", type=Path, metavar="DIR", help="draft folder (default: the latest)")
    parser.add_argument("--out", type=Path, help="evaluation folder (default: eval/ beside the first draft)")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with this evaluation folder, by its own recipe"
    )
    parser.add_argument("--against", type=Path, metavar="REPORT", help="an earlier report.json to set beside")
    parser.add_argument("--gate", action="store_true", help="exit 1 when the verdict is no-go")
    parser.add_argument("--check", action="store_true", help="check recipe, drafts and prompts, measure nothing")
    args = parser.parse_intermixed_args(argv)
    if args.resume is not None and (args.recipe or args.draft or args.out or args.check):
        parser.error(
            "--resume takes recipe and drafts from the folder: leave out RECIPE, key=value, --draft, --out, --check"
        )
    if args.resume is None and (not args.recipe or ("=" in args.recipe and not Path(args.recipe).exists())):
        parser.error("a recipe is needed, for example recipes/code.yaml")
    talk(console)
    with Stop().listening():
        return guarded(lambda: _work(args), "no report was written")


def _work(args: argparse.Namespace) -> int:
    """What the command line asks for; the exit code."""
    earlier = read_earlier(args.against) if args.against else None
    if args.resume is not None:
        report, folder = _resume(args.resume, earlier)
    else:
        recipe = load_recipe(args.recipe, args.overrides)
        folders = args.draft or [Path(recipe.output_dir) / recipe.name / "latest" / "draft"]
        names = draft_names(folders)
        if args.check:
            from eval.check import check

            print(dump(recipe), flush=True)  # noqa: T201 - the answer to --check
            check(recipe, args.recipe, names)
            return 0
        report, folder = evaluate(recipe, names, args.out, earlier)
    console.print(terminal_table(report), crop=False)  # a narrow log must not cut the verdict
    say.print(f"report: {folder / 'report.html'}")
    return 1 if args.gate and not report["verdict"]["go"] else 0


def _resume(folder: Path, earlier: dict[str, Any] | None) -> tuple[dict[str, Any], Path]:
    """Goes on with an evaluation, or finds that it has its report."""
    run = find_stopped(folder)
    if (path := folder / REPORT).exists():
        log.info("nothing to do: it has its report")
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON ({error}); delete it, and it is made again") from error
        with whole(path, "report"):
            terminal_table(report)
        return report, folder
    drafts = {name: Path(path) for name, path in run["drafts"].items()}
    draft_names(list(drafts.values()))  # they are still there
    return evaluate(recipe_of(folder, run), drafts, folder, earlier, run)


def draft_names(folders: Sequence[Path]) -> dict[str, Path]:
    """A short name for each draft folder: its own name, or the recipe's for the usual `.../draft`.

    Raises:
        ValueError: a folder is no finished draft, or is given twice.
    """
    names: dict[str, Path] = {}
    for folder in folders:
        if not (folder / "config.json").is_file():
            missing = "it is a file" if folder.exists() else "there is no such folder"
            why = "it has no config.json" if folder.is_dir() else missing
            raise ValueError(
                f"{folder} is no finished draft ({why}); train one with "
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
    recipe: Recipe,
    drafts: dict[str, Path],
    out: Path | None = None,
    earlier: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], Path]:
    """Measures the drafts of a recipe and writes the report.

    Args:
        recipe: its target, traffic.heldout and eval stages count.
        drafts: folders by name.
        out: evaluation folder; None makes eval/<time> beside the first draft.
        earlier: a report to set beside this one.
        run: of `find_stopped`, to go on with the evaluation in `out`; recipe and drafts are then its own.

    Returns:
        the report and its folder.

    Raises:
        ValueError: a draft that does not fit the target, no held-out prompts, or another world than before the stop.
    """
    if out is None:
        name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S") + (SIMULATED if recipe.eval.simulate else "")
        out = next(iter(drafts.values())).resolve().parent / "eval" / name
    if run is None and (out / ROWS).exists():
        raise ValueError(
            f"{out / ROWS} holds rows of an earlier evaluation; go on with it (--resume), or give another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    if (lock := try_lock(out)) is None:
        raise ValueError(f"{out}: another process is measuring into it; wait for it, or give another --out")
    try:
        stopped = None if run is None else keep_whole(out, run)
        if stopped is None or not stopped.measured:
            run = _measure(recipe, drafts, out, stopped)
        assert run is not None
        with nullcontext() if stopped is None else whole(out / RUN, "run.json"):
            report = build_report(read_rows(out / ROWS), run["plan"], run["provenance"], run["settings"])
        if earlier is not None:
            try:
                report["against"] = before_after(earlier, report)
            except ValueError as fault:
                # Hours of rows are worth a report without this one figure.
                log.warning("no before and after: %s", fault)
        write_report(out, report)
        try:
            copy_report(recipe.track, out, run, report)
        except (TrackError, OSError) as fault:  # the report is whole, whatever becomes of its copy
            log.warning("no copy in W&B: %s", fault)
        return report, out
    except (Interrupted, OSError):
        if (out / RUN).exists():
            say.print(f"rows measured so far are kept; go on with: python -m eval.run --resume {shlex.quote(str(out))}")
        raise
    finally:
        os.close(lock)
        if not any(out.iterdir()):
            out.rmdir()


def _measure(recipe: Recipe, drafts: dict[str, Path], out: Path, stopped: Stopped | None) -> dict[str, Any]:
    """Costs, unless they are known from before a stop, then all rows; what run.json holds."""
    from engine.costs import Costs
    from eval.rounds import arms_of, measure_all
    from eval.setup import costs_of, set_up
    from eval.trees import tree_arm

    bench, traffic, meta = set_up(recipe, drafts)
    memory = meta.pop("memory")
    sha = requests_sha256((r.id, r.domain, r.ids) for r in traffic.requests)
    provenance = collect(recipe.seed, str(bench.target.device))
    if stopped is None:
        log.info("measuring what a cycle costs, with each draft")
        plan = {**costs_of(recipe, bench, traffic.requests), "memory": memory}
        arms, plan["trees"] = arms_of(recipe, bench, traffic, list(drafts))
        settings = {
            **recipe.eval.model_dump(mode="json"),
            "domain": recipe.traffic.domain,
            "dtype": recipe.target.dtype,
            "seed": recipe.seed,
            "target": recipe.target.model,
            **meta,
        }
        run = {"recipe": json.loads(dump(recipe)), "settings": settings, "plan": plan, "provenance": provenance}
        run |= {"drafts": {name: str(path.resolve()) for name, path in drafts.items()}, "requests_sha256": sha}
    else:
        run = stopped.run
        machine = {key: provenance[key] for key in ("cpu", "device")}
        before = {**run["settings"], **run["provenance"], "requests": run["requests_sha256"]}
        check_same(out, before, {**meta, **machine, "requests": sha})
        run = {**run, "resumed": [*run.get("resumed", []), provenance]}
        bench.costs = [Costs.from_json(cost) for cost in run["plan"]["costs"]]
        trees = (tree_arm(about) for about in run["plan"]["trees"])
        arms = [*grid(recipe.eval, drafts), *(arm for arm in trees if arm is not None)]
        log.info("going on behind %d rows", len(stopped.rows))
    write_json(out / RUN, run)
    run["settings"] |= measure_all(recipe, bench, traffic.requests, arms, out, stopped, console)
    write_json(out / RUN, run)
    return run


if __name__ == "__main__":
    sys.exit(main())
