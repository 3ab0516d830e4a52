"""Two processes on a CPU (gloo) against one with the same global batch, and their interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.checkpoint import read_draft
from distill.train import main
from tests.distill.test_train import ROOT, newest, train_rows, write_world

# An odd number of answers, and of batches in an epoch.
ODD = ["traffic.num_train=23", "track.mode=disabled", "distill.max_steps=8", "distill.validate_every=4"]
TWO = ["trainer.devices=2", "trainer.strategy=ddp", *ODD]


def start(world: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    fresh = [] if "--resume" in arguments else [str(world / "recipe.yaml"), f"output_dir={folder}/runs"]
    command = [sys.executable, "-m", "distill.train", *fresh, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> None:
    error = process.communicate(timeout=240)[1]
    assert process.returncode == code, error


def state(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
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


def test_two_processes_are_one_with_the_same_global_batch(world: Path, two: Path) -> None:
    assert main([str(world / "recipe.yaml"), f"output_dir={world}/one/runs", "distill.accumulate=2", *ODD]) == 0
    one = newest(world / "one")
    for expected, found in zip(untimed(one), untimed(two), strict=True):  # rows, steps and validations are not doubled
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    expected, found = state(one), state(two)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)
    assert sum(row["num_tok"] for row in train_rows(two) if "loss" in row) == train_rows(two)[-2]["tok_seen"]


def test_the_first_process_alone_writes(two: Path) -> None:
    assert [path.name for path in two.parent.iterdir() if path.name != "latest"] == [two.name]
    assert {path.name for path in (two / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert (two / "train.log").read_text().count("training on 23 prompts") == 1
    assert json.loads((two / "recipe.json").read_text())["trainer"]["devices"] == 2
    assert read_draft(two / "draft").meta["steps"] == 8


def test_t46_a_signal_to_the_first_process_stops_both_and_the_run_resumes(
    world: Path, two: Path, tmp_path: Path
) -> None:
    slow = [*TWO, "distill.max_steps=100000", "distill.warmup_steps=2"]
    process = start(world, tmp_path, *slow)
    deadline = time.monotonic() + 200
    while not ((tmp_path / "runs").exists() and len(train_rows(newest(tmp_path))) >= 3):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    finish(process, 143)
    run = newest(tmp_path)
    assert not (run / "draft").exists()
    step = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert step == train_rows(run)[-1]["step"]
    finish(start(world, tmp_path, "--resume", str(run), f"distill.max_steps={step + 2}"))
    resumed = [row for row in train_rows(run) if row["attempt"] == 1 and "loss" in row]
    assert [row["step"] for row in resumed] == [step + 1, step + 2]
    assert read_draft(run / "draft").meta["steps"] == step + 2


def test_a_launcher_that_starts_several_is_refused(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([str(world / "recipe.yaml"), f"output_dir={world}/refused", "track.mode=disabled"]) == 2
    assert "start one" in capsys.readouterr().err
    assert not (world / "refused").exists()
