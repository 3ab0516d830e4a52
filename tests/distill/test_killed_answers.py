"""kill -9 of the writer of answers, and a full disk: resumed, the folder is byte for byte that of a run left alone.

SPECDRAFT_KILLS=20 makes a long campaign of the kills at random moments.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from distill.models import load_model
from distill.recipe import load_recipe
from distill.runs import Run
from distill.shape import find_target
from distill.shards import read_manifest
from distill.stages import write_answers
from distill.tokens import eos_ids
from distill.train import main
from tests.distill.test_train import write_world
from tests.servers import save, serve

KILLS = int(os.environ.get("SPECDRAFT_KILLS", "3"))
OURS = ["responses.shard_rows=8", "responses.max_new_tok=16", "distill.num_validation=6"]


def generate(recipe: Path, overrides: list[str], folder: Path, rename: int = 0) -> None:
    """The answers stage, in a process that may be killed; it kills itself before its rename number `rename`."""
    torch.set_num_threads(1)
    num = 0

    def hook(event: str, values: tuple[object, ...]) -> None:
        nonlocal num
        if event == "os.rename" and str(values[1]).startswith(str(folder)):
            num += 1
            if num == rename:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    wanted = load_recipe(recipe, overrides)
    target = find_target(wanted)
    model = load_model(target.folder, "float32", "cpu")
    write_answers(
        wanted, Run(folder, 0), target, model, eos_ids(model.config, model.generation_config, target.tokenizer)
    )


@dataclass(frozen=True)
class World:
    """A recipe, and what its answers stage leaves when nobody kills it, after so many seconds."""

    recipe: Path
    overrides: list[str]
    whole: dict[str, bytes]
    seconds: float

    def start(self, folder: Path, rename: int = 0) -> BaseProcess:
        return start(self.recipe, self.overrides, folder, rename)


def start(recipe: Path, overrides: list[str], folder: Path, rename: int = 0) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=generate, args=(recipe, overrides, folder, rename))
    process.start()
    return process


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left_alone(recipe: Path, overrides: list[str], folder: Path) -> World:
    for name in ("warm", "whole"):  # the first one waits for the imports too
        began = time.monotonic()
        process = start(recipe, overrides, folder / name)
        process.join()
        assert process.exitcode == 0
    return World(recipe, overrides, content(folder / "whole"), time.monotonic() - began)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = write_world(tmp_path_factory.mktemp("killed"))
    return left_alone(folder / "recipe.yaml", [f"output_dir={folder}/runs", *OURS], folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = write_world(tmp_path_factory.mktemp("killed"))
    save(folder / "writer")
    with serve(folder / "writer") as (url, _):
        asked = [f"target.model={folder}/writer", "responses.temperatures=[0.0]", f"responses.server=['{url}']"]
        yield left_alone(folder / "recipe.yaml", [*OURS, *asked, "responses.concurrency=3"], folder)


def campaign(world: World, folder: Path, kills: int, seed: int) -> None:
    """Kills at random moments, folder after folder, each until a run gets through; all end as the one left alone."""
    chance, killed, runs = random.Random(seed), 0, 0
    while killed < kills:
        runs += 1
        while True:
            process = world.start(folder / str(runs))
            process.join(chance.uniform(0.0, world.seconds))
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
        assert process.exitcode == 0
        assert content(folder / str(runs)) == world.whole
    print(f"{killed} kills at random moments of {world.seconds:.1f} s, {runs} folders, all equal")  # noqa: T201


@pytest.mark.slow
def test_killed_at_random_moments(world: World, tmp_path: Path) -> None:
    assert len([name for name in world.whole if "rows-" in name]) >= 4
    campaign(world, tmp_path, KILLS, seed=7)


@pytest.mark.slow
def test_killed_at_random_moments_while_servers_answer(served: World, tmp_path: Path) -> None:
    campaign(served, tmp_path, KILLS, seed=11)


@pytest.mark.slow
def test_killed_before_each_rename(world: World, tmp_path: Path) -> None:
    """States, rows and manifest of a shard are renamed in turn: each in-between state is left behind and resumed."""
    killed = 0
    for rename in cycle((1, 2, 3, 5)):
        process = world.start(tmp_path / "run", rename)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        killed += 1
    assert killed >= 12 and content(tmp_path / "run") == world.whole


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A file system in memory of this size; the call given gives it another one."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root alone")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("tmpfs can not be mounted here")
    try:
        yield lambda more: subprocess.run(["mount", "-o", f"remount,size={more}", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(world: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "40k") as resize:
        run = tmp_path / "disk" / "run"
        for size in ("40k", "60k"):
            resize(size)
            with pytest.raises(OSError, match=r"shard \d could not be written .* make room .* --resume"):
                generate(world.recipe, world.overrides, run)
            assert not list(run.rglob("*.tmp"))
            for folder in (run / "responses", run / "responses" / "heldout"):
                named = read_manifest(folder)["shards"] if (folder / "manifest.json").exists() else []
                assert len(list(folder.glob("rows-*"))) == len(list(folder.glob("hidden-*"))) == len(named)
        resize("16m")
        generate(world.recipe, world.overrides, run)
        assert content(run) == world.whole


@pytest.mark.slow
@pytest.mark.parametrize("size", ["12k", "40k"])
def test_the_entry_tells_a_full_disk_once(
    world: World, tmp_path: Path, size: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Logs and the tracker's files fail too, and must not hide what is told."""
    with small_disk(tmp_path / "disk", size):
        assert main([str(world.recipe), *world.overrides, f"output_dir={tmp_path}/disk/runs"]) == 1
    told = capfd.readouterr().err
    assert sum(line.startswith("error: ") for line in told.splitlines()) == 1 and "Traceback" not in told
    assert "responses (" in told and "go on with --resume" in told
