"""The trainer is killed before every kind of rename, from its first file to the link to the run, and goes on.

Files are whole or absent, so what a kill can leave is told by the renames that were made; each in-between state is left
behind once and resumed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from distill.checkpoint import read_draft
from distill.train import main
from tests.distill.test_kill import content, trail
from tests.distill.test_train import newest, write_world

LESS = ["track.mode=disabled", "distill.validate_every=4", "distill.checkpoint_every=3"]


def kind(path: Path) -> str:
    """What a rename makes, without numbers and random letters."""
    name = "former draft" if path.parent.name.startswith(".draft-old-") else path.name
    where = "heldout/" if path.parent.name == "heldout" else ""
    return where + re.sub(r"\d+", "N", name)


def work(arguments: list[str], world: str, notes: str, kinds: tuple[str, ...]) -> None:
    """Trains; kills itself before a rename of a kind that is not noted yet, and notes it."""
    seen = Path(notes).read_text().splitlines()

    def hook(event: str, values: tuple[object, ...]) -> None:
        made = Path(str(values[1])) if event == "os.rename" else None
        if made is None or not str(made).startswith(world):
            return
        if kind(made) not in seen and (not kinds or kind(made) in kinds):
            with Path(notes).open("a") as file:
                file.write(f"{kind(made)}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    sys.exit(main(arguments))


def kill_all(world: Path, begin: list[str], kinds: tuple[str, ...] = ()) -> list[str]:
    """Starts and resumes until a process gets through; returns what the killed ones were about to rename."""
    notes = world / "notes.txt"
    notes.write_text("")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    arguments = begin
    for _ in range(40):
        process = context.Process(target=work, args=(arguments, str(world / "runs"), str(notes), kinds))
        process.start()
        process.join()
        if process.exitcode == 0:
            return notes.read_text().splitlines()
        assert process.exitcode == -signal.SIGKILL
        if (runs := list(world.glob("runs/tiny/2*/recipe.json"))) and "--resume" not in arguments:
            arguments = ["--resume", str(runs[0].parent)]
    raise AssertionError("it did not get through")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_before_each_rename_a_run_ends_as_one_left_alone(tmp_path: Path) -> None:
    world = write_world(tmp_path)
    killed = kill_all(world, [str(world / "recipe.yaml"), *LESS])
    for made in ("recipe.json", "rows-N.jsonl", "manifest.json", "heldout/manifest.json", "plan.json"):
        assert made in killed
    late = [
        "last.ckpt",
        "best.ckpt",
        "previous.ckpt",
        "draft",
        "latest",
    ]  # others are made beside the draft, and renamed
    assert [name for name in killed if name in late] == late
    runs = sorted(path.parent for path in world.glob("runs/tiny/2*/recipe.json"))
    assert len(runs) == 1
    run = runs[0]
    assert (run.parent / "latest").resolve() == run.resolve(), "the finished run is not the latest"
    assert (run / "curves.svg").is_file()
    assert (run / "provenance.json").is_file(), "it could not be released"
    assert leftovers(run) == []

    # The same costs, never interrupted.
    whole = world / "whole" / run.name
    whole.mkdir(parents=True)
    for name in ("recipe.json", "plan.json"):
        shutil.copy(run / name, whole / name)
    assert main(["--resume", str(whole)]) == 0
    assert trail(run) == trail(whole)
    for folder in ("draft", "responses"):
        assert content(run / folder) == content(whole / folder)
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = (torch.load(f / "checkpoints" / name, weights_only=True)["state_dict"] for f in (run, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_longer_run_that_is_killed_does_not_keep_the_former_draft(tmp_path: Path) -> None:
    """The former draft stays until the new one is there, and is not taken for it."""
    world = write_world(tmp_path)
    assert main([str(world / "recipe.yaml"), *LESS, "distill.max_steps=4"]) == 0
    run = newest(world)
    whole = world / "whole" / run.name
    shutil.copytree(run, whole)
    kinds = ("former draft", "draft")
    assert kill_all(world, ["--resume", str(run), "distill.max_steps=8"], kinds) == [*kinds]
    assert read_draft(run / "draft").meta["steps"] == 8
    assert leftovers(run.parent) == []
    assert main(["--resume", str(whole), "distill.max_steps=8"]) == 0
    assert content(run / "draft") == content(whole / "draft")
