"""Two processes on a CPU (gloo) against one with the same global batch, and their interruption.

They are started in each of the three ways: by the first of them, by torchrun, and as srun does it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.checkpoint import read_draft
from distill.train import main
from tests.distill.test_train import ROOT, newest, train_rows, write_world

pytestmark = pytest.mark.slow

# An odd number of answers, and of batches in an epoch.
ODD = ["traffic.num_train=23", "track.mode=disabled", "distill.max_steps=8", "distill.validate_every=4"]
TWO = ["trainer.devices=2", *ODD]
FSDP = [*TWO, "trainer.strategy=fsdp"]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
TIMEOUT = float(os.environ.get("SPECDRAFT_TEST_TIMEOUT_S", "240"))
# More than it will take.
ENDLESS = ["distill.max_steps=100000", "distill.warmup_steps=2"]


def start(world: Path, folder: Path, *arguments: str, by: Sequence[str] = ()) -> subprocess.Popen[str]:
    fresh = [] if "--resume" in arguments else [str(world / "recipe.yaml"), f"output_dir={folder}/runs"]
    command = [sys.executable, "-m", *by, "distill.train", *fresh, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@dataclass
class Forked:
    """A process with what srun sets, forked from a server that has the imports; it answers as Popen does."""

    process: BaseProcess
    said: Path

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process.pid), timeout or 0)
        return None, self.said.read_text()

    def send_signal(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def kill(self) -> None:
        self.process.kill()


def work(environment: dict[str, str], arguments: list[str], said: Path) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    code = main(arguments)
    # Gloo's threads would abort the process if its exit overtook them, which is rare: so this, and not only the code.
    sys.exit(99 if code in (0, 143) and torch.distributed.is_initialized() else code)


def srun(world: Path, folder: Path, *arguments: str) -> list[Forked]:
    """Two processes with what srun sets; the port is taken from the job's number, or as here from MASTER_PORT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_PORT": port}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distill.test_ranks"])
    fresh = [] if "--resume" in arguments else [str(world / "recipe.yaml"), f"output_dir={folder}/runs"]
    forked = []
    for rank in ("0", "1"):
        own = {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_JOB_ID": "17"}
        said = folder / f"said-{time.monotonic_ns()}"
        folder.mkdir(exist_ok=True)
        forked.append(Forked(context.Process(target=work, args=(own, [*fresh, *arguments], said)), said))
        forked[-1].process.start()
    return forked


Started = subprocess.Popen[str] | Forked


def finish(process: Started, code: int = 0) -> str:
    try:
        error = process.communicate(timeout=TIMEOUT)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, error
    return error


def wait_for_step(folder: Path, step: int, *processes: Started) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not (any(folder.glob("runs/tiny/2*")) and len(train_rows(newest(folder))) >= step):
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def last(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return found


def state(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = last(run)["state_dict"]
    return found


def untimed(run: Path) -> list[dict[str, Any]]:
    # The costs are measured anew in each run, so what is predicted from them differs.
    ours = ("attempt", "step_ms", "tok_per_s", "val/speedup", "val/best_k", "val/code/speedup", "val/math/speedup")
    ours += ("val/code/best_k", "val/math/best_k")
    return [{key: value for key, value in row.items() if key not in ours} for row in train_rows(run)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def two(world: Path) -> Path:
    """A finished run of two processes."""
    finish(start(world, world / "two", *TWO))
    return newest(world / "two")


@pytest.fixture(scope="module")
def one(world: Path) -> Path:
    """One process with the global batch of two."""
    assert main([str(world / "recipe.yaml"), f"output_dir={world}/one/runs", "distill.accumulate=2", *ODD]) == 0
    return newest(world / "one")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_of_torchrun_are_one_with_the_same_global_batch(
    strategy: str, world: Path, one: Path, tmp_path: Path
) -> None:
    finish(start(world, tmp_path, *TWO, f"trainer.strategy={strategy}", by=TORCHRUN))
    check_equal(one, newest(tmp_path))


def test_two_processes_started_by_the_first_are_one(one: Path, two: Path) -> None:
    check_equal(one, two)


def check_equal(one: Path, two: Path) -> None:
    for expected, found in zip(untimed(one), untimed(two), strict=True):  # rows, steps and validations are not doubled
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    expected, found = state(one), state(two)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)
    assert sum(row["num_tok"] for row in train_rows(two) if "loss" in row) == train_rows(two)[-2]["tok_seen"]
    first, second = (last(run)["optimizer_states"][0]["state"] for run in (one, two))
    assert len(first) == len(second)
    drafts = [read_draft(run / "draft") for run in (one, two)]
    assert [draft.meta["steps"] for draft in drafts] == [8, 8]
    ours, theirs = ({path.name for path in (run / "draft").iterdir()} for run in (one, two))
    assert ours == theirs


def test_who_starts_them_does_not_matter(world: Path, two: Path, tmp_path: Path) -> None:
    """srun's two are bit for bit those that the first process starts."""
    for process in srun(world, tmp_path, *TWO):
        finish(process)
    assert untimed(newest(tmp_path)) == untimed(two)
    expected, found = state(two), state(newest(tmp_path))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_first_process_alone_writes(two: Path) -> None:
    assert [path.name for path in two.parent.iterdir() if path.name != "latest"] == [two.name]
    assert {path.name for path in (two / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert (two / "train.log").read_text().count("training on 23 prompts") == 1
    assert json.loads((two / "recipe.json").read_text())["trainer"]["devices"] == 2
    assert read_draft(two / "draft").meta["steps"] == 8


def test_t46_a_signal_to_the_first_process_stops_both_and_the_run_resumes(
    world: Path, two: Path, tmp_path: Path
) -> None:
    process = start(world, tmp_path, *TWO, *ENDLESS)
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGTERM)
    finish(process, 143)
    run = newest(tmp_path)
    assert not (run / "draft").exists()
    step = last(run)["global_step"]
    assert step == train_rows(run)[-1]["step"]
    finish(start(world, tmp_path, "--resume", str(run), f"distill.max_steps={step + 2}"))
    resumed = [row for row in train_rows(run) if row["attempt"] == 1 and "loss" in row]
    assert [row["step"] for row in resumed] == [step + 1, step + 2]
    assert read_draft(run / "draft").meta["steps"] == step + 2


def test_t46_a_signal_to_any_process_saves_once_and_stops_all(world: Path, tmp_path: Path) -> None:
    first, second = srun(world, tmp_path, *FSDP, *ENDLESS)
    wait_for_step(tmp_path, 3, first, second)
    second.send_signal(signal.SIGTERM)
    assert "--resume" in finish(first, 143)
    finish(second, 143)
    run = newest(tmp_path)
    assert last(run)["global_step"] == train_rows(run)[-1]["step"]
    assert not (run / "draft").exists()


def test_t42_a_resumed_sharded_run_is_the_same_run(world: Path, tmp_path: Path) -> None:
    """Interrupted under torchrun by its agent, resumed by plain python: weights and optimizer bit for bit."""
    long = [*FSDP, "distill.max_steps=150"]
    whole = start(world, tmp_path / "whole", *long)
    finish(whole)
    process = start(world, tmp_path / "cut", *long, by=TORCHRUN)
    wait_for_step(tmp_path / "cut", 20, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode != 0
    expected, found = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert 10 <= last(found)["global_step"] == train_rows(found)[-1]["step"] < 150
    finish(start(world, tmp_path / "cut", "--resume", str(found)))
    rows = [{row["step"]: row for row in untimed(run) if "loss" in row} for run in (expected, found)]
    assert rows[0] == rows[1]
    ours, theirs = last(found), last(expected)
    assert all(torch.equal(ours["state_dict"][name], theirs["state_dict"][name]) for name in theirs["state_dict"])
    for index, values in theirs["optimizer_states"][0]["state"].items():
        assert all(torch.equal(ours["optimizer_states"][0]["state"][index][name], values[name]) for name in values)


def test_a_process_that_is_killed_ends_the_others_with_a_message(world: Path, tmp_path: Path) -> None:
    first, second = srun(world, tmp_path, *TWO, *ENDLESS)
    wait_for_step(tmp_path, 8, first, second)
    second.kill()
    second.communicate()
    error = finish(first, 1)
    assert "Traceback" not in error
    assert "--resume" in error
    assert last(newest(tmp_path))["global_step"] >= 5


def test_a_mistake_that_the_first_process_finds_ends_all(world: Path, tmp_path: Path) -> None:
    first, second = srun(world, tmp_path, *TWO, "draft.size_frac=[0.01, 0.02]")
    assert "draft.size_frac" in finish(first, 2)
    assert "Traceback" not in finish(second, 1)


def test_a_finished_run_has_nothing_to_do_for_all(world: Path, two: Path) -> None:
    first, second = srun(world, two, "--resume", str(two))
    assert "nothing to do" in finish(first)
    finish(second)
