"""A disk that fills up while a checkpoint or the draft is written: a message, nothing half-written, and it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill.checkpoint import read_draft
from distill.fit import checkpoint_step
from distill.runs import Run, is_whole
from distill.train import main
from tests.distill.test_train import newest, train_rows, write_world

LESS = ["track.mode=disabled", "distill.validate_every=5", "distill.checkpoint_every=5"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], check=False).returncode
    ):
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Takes all room but `leave` bytes."""
    filler = disk / "filler"
    filler.write_bytes(b"\0" * max(0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - leave))
    return filler


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in (run / "checkpoints").iterdir()}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "draft" / "model.safetensors")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def test_a_full_disk_costs_the_steps_since_the_last_checkpoint(
    world: Path, disk: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main([str(world / "recipe.yaml"), f"output_dir={disk}/runs", "distill.max_steps=5", *LESS]) == 0
    run = newest(disk)
    before = files(run)
    filler = fill(disk, leave=200_000)  # a third of a checkpoint, and room for the log's lines
    assert main(["--resume", str(run), "distill.max_steps=10"]) == 1
    error = capsys.readouterr().err
    assert "MB are free; the older one is kept" in error
    assert f"--resume {run}" in caplog.text
    assert "Traceback" not in error
    assert files(run) == before  # nothing lost, nothing half-written
    assert checkpoint_step(Run(run).last) == 5
    filler.unlink()
    assert main(["--resume", str(run)]) == 0
    assert read_draft(run / "draft").meta["steps"] == 10
    assert [row["step"] for row in train_rows(run) if row["attempt"] == 2 and "loss" in row] == [6, 7, 8, 9, 10]
    assert all(is_whole(path) for path in (run / "checkpoints").iterdir())


def test_a_full_disk_leaves_no_draft_that_looks_finished(
    world: Path, disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(world / "recipe.yaml"), f"output_dir={disk}/runs", "distill.max_steps=5", *LESS]) == 0
    run = newest(disk)
    expected = weights(run)
    asked = shutil.disk_usage
    for known in (True, False):  # found beforehand; or on the way, where a quota is not in the disk's own figures
        shutil.rmtree(run / "draft")
        filler = fill(disk, leave=150_000)
        if not known:
            monkeypatch.setattr("shutil.disk_usage", lambda folder: asked("/"))
        assert main(["--resume", str(run)]) == 1
        error = capsys.readouterr().err
        assert ("MB are free" if known else "No space left on device") in error
        assert "Traceback" not in error
        assert not (run / "draft").exists()
        assert not list(run.glob(".draft-*"))
        filler.unlink()
        assert main(["--resume", str(run)]) == 0
        found = weights(run)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_log_that_cannot_grow_stops_the_run_with_a_message(
    world: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(world / "recipe.yaml"), f"output_dir={disk}/runs", "distill.max_steps=5", *LESS]) == 0
    run = newest(disk)
    rows = train_rows(run)
    filler = fill(disk, leave=0)
    with (disk / "rest").open("wb", buffering=0) as rest, pytest.raises(OSError, match="No space"):
        while True:
            rest.write(b"\0" * 512)
    assert main(["--resume", str(run), "distill.max_steps=10"]) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "Traceback" not in error
    filler.unlink()
    assert main(["--resume", str(run), "distill.max_steps=10"]) == 0
    assert train_rows(run)[: len(rows)] == rows
    assert {row["step"] for row in train_rows(run) if "loss" in row} == set(range(1, 11))
