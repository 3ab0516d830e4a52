"""Run folders: checkpoints that are whole or absent, what a resumption may change, signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from distill.auto import settle
from distill.recipe import Recipe, dump
from distill.runs import Interrupted, Run, RunError, Stop, create_run, is_whole, reopen_run
from distill.schema import Draft


def recipe(tmp_path: Path, **distill: int) -> Recipe:
    base = settle(Recipe(name="tiny", output_dir=str(tmp_path / "runs"), draft=Draft(num_layers=2)))
    return base.model_copy(update={"distill": base.distill.model_copy(update=distill)})


def save(step: int):  # type: ignore[no-untyped-def]
    return lambda path: torch.save({"global_step": step, "weight": torch.ones(1000)}, path)


def test_a_new_run_holds_recipe_and_provenance(tmp_path: Path) -> None:
    first, second = (create_run(recipe(tmp_path), {"git": "abc"}) for _ in range(2))
    assert first.folder != second.folder
    assert first.folder.parent == tmp_path / "runs" / "tiny"
    assert (first.folder / "recipe.json").read_text().strip() == dump(recipe(tmp_path))
    assert json.loads((first.folder / "provenance.json").read_text()) == {"git": "abc"}


def test_latest_points_at_the_run_that_finished_last(tmp_path: Path) -> None:
    first, second = (create_run(recipe(tmp_path), {}) for _ in range(2))
    for run in (first, second):
        run.link_latest()
    latest = tmp_path / "runs" / "tiny" / "latest"
    assert latest.is_symlink()
    assert latest.resolve() == second.folder.resolve()
    assert os.readlink(latest) == second.run_id  # relative: the tree can be moved
    assert first.is_linked() and second.is_linked()  # a later run's is not taken away
    latest.unlink()
    assert not second.is_linked()
    first.link_latest()
    assert first.is_linked() and not second.is_linked()


def test_t44_falls_back_to_the_last_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    assert run.newest_whole() is None
    run.save_last(save(5))
    run.save_last(save(10))
    assert run.newest_whole() == run.last
    run.last.write_bytes(run.last.read_bytes()[: run.last.stat().st_size // 2])
    assert run.newest_whole() == run.previous
    assert torch.load(run.previous)["global_step"] == 5
    assert str(run.last) in caplog.text
    run.previous.write_bytes(b"")
    assert run.newest_whole() is None


def test_t44_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save_last(save(5))
    data = bytearray(run.last.read_bytes())
    data[len(data) // 2] ^= 1
    run.last.write_bytes(data)
    assert not is_whole(run.last)


def test_t44_a_failed_save_keeps_what_was_there(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save_last(save(5))

    def disk_full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def silent(path: Path) -> None:
        path.write_bytes(b"half")

    with pytest.raises(OSError, match="No space"):
        run.save_last(disk_full)
    with pytest.raises(RunError, match="whole"):
        run.save_last(silent)
    assert torch.load(run.last)["global_step"] == 5
    assert [path.name for path in run.last.parent.iterdir()] == ["last.ckpt"]


def test_resume_keeps_every_other_key(tmp_path: Path) -> None:
    run = create_run(recipe(tmp_path, max_steps=30), {})
    again = reopen_run(run.folder, recipe(tmp_path, max_steps=50), {})
    assert again.attempt == 1
    assert json.loads((run.folder / "recipe.json").read_text())["distill"]["max_steps"] == 50
    assert reopen_run(run.folder, recipe(tmp_path, max_steps=50), {}).attempt == 2
    with pytest.raises(RunError, match=r"distill\.accumulate: the run has 1, asked for 2"):
        reopen_run(run.folder, recipe(tmp_path, max_steps=50, accumulate=2), {})


def test_a_run_of_a_version_without_a_key_goes_on_at_its_default(tmp_path: Path) -> None:
    run = create_run(recipe(tmp_path), {})
    begun = json.loads((run.folder / "recipe.json").read_text())
    del begun["distill"]["accumulate"]
    (run.folder / "recipe.json").write_text(json.dumps(begun))
    with pytest.raises(RunError, match=r"distill\.accumulate: the run has 1, asked for 2"):
        reopen_run(run.folder, recipe(tmp_path, accumulate=2), {})
    assert reopen_run(run.folder, recipe(tmp_path), {}).attempt == 1


def test_resume_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"recipe\.json"):
        reopen_run(tmp_path, recipe(tmp_path), {})


def test_t55_rows_are_only_ever_added(tmp_path: Path) -> None:
    Run(tmp_path).append({"step": 8, "loss": 1.0})
    Run(tmp_path, attempt=1).append({"step": 6, "loss": 2.0})
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [(row["attempt"], row["step"]) for row in rows] == [(0, 8), (1, 6)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_t46_a_signal_is_deferred_inside_a_step_and_raised_outside(signum: int) -> None:
    before = signal.getsignal(signum)
    with Stop().listening() as stop:
        stop.deferred = True
        os.kill(os.getpid(), signum)
        assert stop.signum == signum
        with pytest.raises(Interrupted):
            stop.check()
        with pytest.raises(Interrupted):  # the second one does not wait
            os.kill(os.getpid(), signum)
        fresh = Stop()
        fresh.install()
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), signum)
        assert caught.value.signum == signum
    assert signal.getsignal(signum) is before
