"""Where a process finds its place, and what it refuses before anything is loaded."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distill.launch import ALONE, Board, Place, as_torchrun, check_processes, find_place, others_told, own_run
from distill.runs import Run, RunError
from distill.schema import TrainerStage
from distill.surroundings import first_host
from distill.train import main
from tests.distill.test_train import write_world

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234567",
}
# What sbatch sets for a script that runs python without srun.
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1234567"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, ALONE),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, ALONE),
        (TORCHRUN, Place(5, 1, 8, 4, "torchrun")),
        (SRUN, Place(5, 1, 8, None, "srun")),
        (BATCH, ALONE),
        ({**SRUN, **TORCHRUN, "RANK": "6"}, Place(6, 1, 8, 4, "torchrun")),  # torchrun started by srun
        ({"SPECDRAFT_RUN_FOLDER": "/r", "SPECDRAFT_RUN_ATTEMPT": "2", "LOCAL_RANK": "3"}, Place(3, 3, by="first")),
    ],
)
def test_the_place_is_read_from_what_the_launcher_sets(environment: dict[str, str], place: Place) -> None:
    assert find_place(environment) == place


def test_srun_speaks_torchruns_language() -> None:
    environment = dict(SRUN)
    as_torchrun(environment, first_host(environment), find_place(environment))
    found = {key: value for key, value in environment.items() if not key.startswith("SLURM")}
    assert found == {
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "19567",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "GROUP_RANK": "1",
    }
    chosen = {**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1"}
    as_torchrun(chosen, "node07", find_place(chosen))
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("head", "1")


@pytest.mark.parametrize(
    ("environment", "trainer", "message"),
    [
        (TORCHRUN, TrainerStage(), "1 processes, but torchrun has started 8"),
        (TORCHRUN, TrainerStage(devices=8), "has started 4 processes on this machine"),
        (SRUN, TrainerStage(devices=2, num_nodes=2), "4 processes, but srun has started 8"),
        ({}, TrainerStage(devices=4, num_nodes=2), "torchrun --nnodes 2 --nproc-per-node 4"),
    ],
)
def test_processes_that_do_not_fit_the_recipe_are_refused(
    environment: dict[str, str], trainer: TrainerStage, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        check_processes(trainer, find_place(environment))


@pytest.mark.parametrize(
    ("environment", "trainer"),
    [
        (TORCHRUN, TrainerStage(devices=4, num_nodes=2)),
        (SRUN, TrainerStage(devices=4, num_nodes=2, strategy="fsdp")),
        ({}, TrainerStage(devices=2)),
        ({}, TrainerStage(strategy="single")),
    ],
)
def test_processes_that_fit_are_taken(environment: dict[str, str], trainer: TrainerStage) -> None:
    check_processes(trainer, find_place(environment))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "did not set RANK, LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "first"}, "RANK = 'first'"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK = ''"),
    ],
)
def test_a_launchers_incomplete_environment_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        find_place(environment)


def test_a_launcher_that_starts_more_than_the_recipe_says_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_world(tmp_path)
    for rank, lines in ((0, 1), (1, 0)):  # said once
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        assert main([str(tmp_path / "recipe.yaml"), "track.mode=disabled"]) == 2
        error = capsys.readouterr().err
        assert error.count("torchrun has started 2") == lines
    assert not (tmp_path / "runs").exists()


def test_children_are_told_the_run_and_only_while_they_are_started(tmp_path: Path) -> None:
    with others_told(Run(tmp_path, 3), 2, ALONE):
        assert find_place({**os.environ, "LOCAL_RANK": "1"}).by == "first"
        assert own_run(os.environ) == Run(tmp_path, 3)
    with others_told(Run(tmp_path, 3), 2, Place(0, 0, 2, None, "torchrun")):
        assert "SPECDRAFT_RUN_FOLDER" not in os.environ
    assert "SPECDRAFT_RUN_FOLDER" not in os.environ


@pytest.mark.parametrize("case", ["run", "nothing", "elsewhere"])
def test_the_board_carries_the_run_or_the_end(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for two processes, which have nothing in common but the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    run = {"run": Run(tmp_path, 4), "nothing": None, "elsewhere": Run(tmp_path / "other")}[case]

    def lead() -> Board:
        board = Board(Place(0, 0, 2, None, "torchrun"))
        time.sleep(0.5)
        board.tell(run, 7)
        return board  # the store lives in it

    def join() -> tuple[Run | None, int]:
        return Board(Place(1, 1, 2, None, "torchrun")).listen()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(lead), pool.submit(join)
        kept = first.result(60)
        assert kept.told
        if case == "elsewhere":
            with pytest.raises(RunError, match="a file system that all machines share"):
                second.result(60)
        else:
            assert second.result(60) == ((run, 0) if case == "run" else (None, 7))
