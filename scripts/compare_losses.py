"""python -m scripts.compare_losses RECIPE [key=value ...] --loss NAME ... --minutes M: losses at equal time.

The target answers once; a short probe measures how long a step takes, and each loss then trains for as many steps as
its own probe fits into the minutes. The table shows what each reached on the held-out answers, at its best validation.
--loss takes a name, a mapping such as "{tv: 1.0, forward_kl: 0.1}", or an objective (greedy, sampling).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.provenance import collect
from distill.recipe import Recipe, load_recipe
from distill.runs import Run, create_run
from distill.schema import OBJECTIVE_LOSS
from distill.train import main as train

PROBE_STEPS = 8
WARM_STEPS = 3  # of the probe, not counted


def loss_overrides(loss: str) -> list[str]:
    """What a --loss sets in the recipe, whatever losses or objective that names itself."""
    if loss in OBJECTIVE_LOSS:
        weights = json.dumps(OBJECTIVE_LOSS[loss])
    else:
        weights = loss if loss.startswith("{") else f"{{{loss}: 1.0}}"
    return ["distill.objective=null", f"distill.loss={weights}"]


def start_run(recipe: Recipe, answers: Run | None) -> Run:
    """A run folder that has the answers and the costs of another one already."""
    run = create_run(recipe, collect(recipe.seed))
    if answers is not None:
        run.responses.symlink_to(answers.responses.absolute())
        run.plan.write_text(answers.plan.read_text())
    return run


def train_run(run: Run) -> list[dict[str, Any]]:
    """Trains in the folder; the rows of train.jsonl.

    Raises:
        ValueError: the training ended with an error, which it has said.
    """
    if code := train(["--resume", str(run.folder)]):
        raise ValueError(f"{run.folder}: the training ended with code {code}")
    return [json.loads(line) for line in (run.folder / "train.jsonl").read_text().splitlines()]


def fitting_steps(rows: Sequence[dict[str, Any]], minutes: float) -> int:
    """Optimizer steps that fit into the minutes at a probe's median pace."""
    paces = [row["step_ms"] for row in rows if "step_ms" in row][WARM_STEPS:]
    return max(1, int(60e3 * minutes / statistics.median(paces)))


def summarise(loss: str, seed: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table: steps and minutes of training, and the best validation by predicted speedup."""
    taken = [row for row in rows if "loss" in row]
    best = max((row for row in rows if "val/speedup" in row), key=lambda row: (row["val/speedup"], -row["step"]))
    domains = sorted({name.split("/")[1] for name in best if name.count("/") == 2})
    line = {"loss": loss, "seed": seed, "steps": len(taken), "best_step": best["step"]}
    line["minutes"] = round(sum(row["step_ms"] for row in taken) / 60e3, 2)
    for domain in domains:
        for figure in ("alpha", "alpha_whole", "overlap", "overlap_whole"):
            line[f"{domain} {figure}"] = round(best[f"val/{domain}/{figure}"], 4)
    return line | {"predicted speedup": round(best["val/speedup"], 3)}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    head = list(lines[0])
    rows = [head, ["---"] * len(head), *([str(line[name]) for name in head] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains with each loss and seed."""
    lines: list[dict[str, Any]] = []
    answers: dict[int, Run] = {}  # by seed, which decides the answers too
    schedule = ["distill.warmup_steps=1", f"distill.max_steps={PROBE_STEPS}", f"distill.validate_every={PROBE_STEPS}"]
    for loss in args.loss:
        chosen = [*args.overrides, *loss_overrides(loss), "track.mode=disabled"]
        probe = start_run(
            load_recipe(args.recipe, [*chosen, *schedule, f"seed={args.seed[0]}"]), answers.get(args.seed[0])
        )
        steps = fitting_steps(train_run(probe), args.minutes)
        answers.setdefault(args.seed[0], probe)
        warm = min(load_recipe(args.recipe, args.overrides).distill.warmup_steps, steps // 5)
        for seed in args.seed:
            own = [f"distill.max_steps={steps}", f"distill.warmup_steps={warm}", f"seed={seed}"]
            run = start_run(load_recipe(args.recipe, [*chosen, *own]), answers.get(seed))
            answers.setdefault(seed, run)
            lines.append(summarise(loss, seed, train_run(run)))
            sys.stderr.write(f"{json.dumps(lines[-1])}\n")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, compares and prints the table; --out keeps the lines as JSON too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--loss", action="append", required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of training for each, validation left out")
    parser.add_argument("--seed", type=int, action="append", help="once for each seed; default 0")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_intermixed_args(argv)
    args.seed = args.seed or [0]
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes}: must be above 0")
    try:
        lines = compare(args)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if args.out:
        args.out.write_text(json.dumps({"made": time.strftime("%Y-%m-%d"), "lines": lines}, indent=2) + "\n")
    sys.stdout.write(table(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
