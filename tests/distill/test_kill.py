"""kill -9 of the trainer, as a process of its own, at random moments: what is left, and what it grows to.

SPECDRAFT_KILLS is how often (3); 20 and more are for a long trial.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.curves import read_log
from distill.fit import checkpoint_step
from distill.runs import Run, is_whole
from distill.train import main
from tests.distill.test_train import write_world

KILLS = int(os.environ.get("SPECDRAFT_KILLS", "3"))
EVERY = 7
MAX = 150 + 25 * KILLS  # more steps than they let it take
LONG = ["track.mode=disabled", f"distill.max_steps={MAX}", f"distill.checkpoint_every={EVERY}"]
LONG += ["distill.validate_every=20"]

log = logging.getLogger(__name__)


def begin(*arguments: str) -> BaseProcess:
    """The trainer in a process of its own, forked from a server that has the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distill.test_kill"])
    process = context.Process(target=work, args=(list(arguments),))
    process.start()
    return process


def work(arguments: list[str]) -> None:
    sys.exit(main(arguments))


def steps(run: Path | None) -> list[tuple[int, int]]:
    """(attempt, step) of every training row; a line that was cut is none."""
    if run is None or not (run / "train.jsonl").exists():
        return []
    return [(row["attempt"], row["step"]) for row in read_log(run / "train.jsonl") if "loss" in row]


def trail(run: Path) -> dict[tuple[int, bool], dict[str, Any]]:
    """What counts of each step: its last attempt, without what depends on the clock."""
    timed = ("attempt", "step_ms", "tok_per_s")
    rows = read_log(run / "train.jsonl")
    return {(r["step"], "loss" in r): {k: v for k, v in r.items() if k not in timed} for r in rows}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def opened(world: Path) -> Path | None:
    """The run's folder, once it can be resumed."""
    found = sorted(path.parent for path in world.glob("runs/tiny/2*/recipe.json"))
    return found[-1] if found else None


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_a_killed_run_loses_the_steps_since_its_checkpoint_and_no_more(tmp_path: Path) -> None:
    world, chance = write_world(tmp_path), random.Random(KILLS)
    run, killed, starts = None, [], [1]
    for _ in range(KILLS):
        process = begin("--resume", str(run)) if run else begin(str(world / "recipe.yaml"), *LONG)
        # A quarter of the kills come at any moment before a process's first step; the others after a number of steps
        # and a moment more: within a step, a validation, a write or a rename.
        early = chance.random() < 0.25
        wanted, pause = (1, 10 * chance.random()) if early else (chance.randint(1, 60), 0.05 * chance.random())
        before, deadline = len(steps(run)), time.monotonic() + pause
        while len(steps(run)) < before + wanted and not (early and time.monotonic() > deadline):
            assert process.exitcode is None
            time.sleep(0.005)
            run = run or opened(world)
        time.sleep(0 if early else pause)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        run = run or opened(world)
        assert run is None or not (run / "draft").exists()  # nothing looks finished
        saved = Run(run).newest_whole() if run else None
        at = 0 if saved is None else checkpoint_step(saved)
        if taken := steps(run)[before:]:
            assert at <= taken[-1][1] <= at + EVERY  # a row comes before its step's checkpoint
            starts.append(at + 1)
        killed.append((at, taken[-1][1] if taken else None))
    process = begin("--resume", str(run)) if run else begin(str(world / "recipe.yaml"), *LONG)
    process.join()
    assert process.exitcode == 0
    run = run or opened(world)
    assert run is not None
    found = steps(run)
    assert len(found) == len(set(found))  # nothing doubled within an attempt
    attempts = sorted({attempt for attempt, _ in found})
    # Each attempt goes on right behind its checkpoint, without a gap.
    assert [min(step for number, step in found if number == attempt) for attempt in attempts] == starts, killed
    for attempt in attempts:
        own = [step for number, step in found if number == attempt]
        assert own == list(range(own[0], own[0] + len(own)))
    assert {step for _, step in found} == set(range(1, MAX + 1))
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert all(is_whole(path) for path in (run / "checkpoints").iterdir())
    assert not [path for path in run.iterdir() if path.name.startswith(".")]

    # The same answers and costs, never interrupted.
    whole = world / "whole" / run.name
    shutil.copytree(run, whole, ignore=shutil.ignore_patterns("draft", "checkpoints", "train.jsonl"))
    assert main(["--resume", str(whole)]) == 0
    assert trail(run) == trail(whole)
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = (torch.load(f / "checkpoints" / name, weights_only=True)["state_dict"] for f in (run, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    ours, theirs = (content(folder / "draft") for folder in (run, whole))
    assert "model.safetensors" in ours and "draft.json" in ours and ours == theirs
    log.info("%d kills; (step of the checkpoint, last step taken): %s", len(killed), killed)
