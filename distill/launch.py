"""Who started this process, which of how many it is, and how it learns what the first one has prepared.

One process may start the others of its machine itself: `python -m distill.train` with trainer.devices > 1. They run the
same command and find the run by their environment. Or a launcher starts all of them, on any number of machines:
torchrun, anything else that sets RANK, LOCAL_RANK and WORLD_SIZE, or SLURM's srun. The first process then prepares the
run (answers, costs) while the others wait; it tells them the run's folder, which must lie on a shared file system.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from distill.runs import Run, RunError
from distill.schema_trainer import TrainerStage

# How the first process tells those that it starts what they belong to.
RUN_FOLDER, RUN_ATTEMPT = "SPECDRAFT_RUN_FOLDER", "SPECDRAFT_RUN_ATTEMPT"
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MEET = timedelta(minutes=10)  # for all processes to start
# Longer than the longest validation, during which the others wait. A process that dies is noticed by its starter.
PATIENCE = timedelta(hours=12)
POLL_S = 0.2


@dataclass(frozen=True)
class Place:
    """This process among those of a run.

    Attributes:
        rank: among all, 0 for the first.
        local_rank: on this machine.
        num: how many a launcher has started; 1 where there is none.
        num_local: those on this machine, if the launcher says so.
        by: who started it: a person, the first process of the run, torchrun (or alike), srun.
    """

    rank: int = 0
    local_rank: int = 0
    num: int = 1
    num_local: int | None = None
    by: Literal["person", "first", "torchrun", "srun"] = "person"

    @property
    def launched(self) -> bool:
        """Has a launcher started all processes?"""
        return self.num > 1


ALONE = Place()


def find_place(environment: Mapping[str, str]) -> Place:
    """Reads this process's place from its environment.

    Raises:
        RunError: a launcher's variables are incomplete or not numbers.
    """
    if RUN_FOLDER in environment:
        rank = _number(environment, "LOCAL_RANK")
        return Place(rank, rank, by="first")
    if int(environment.get("WORLD_SIZE", "1") or 1) > 1:
        if missing := [name for name in LAUNCHED if name not in environment]:
            raise RunError(
                f"WORLD_SIZE = {environment['WORLD_SIZE']}, so a launcher has started several processes, but did not "
                f"set {', '.join(missing)}; use torchrun or srun, or unset WORLD_SIZE and start one process"
            )
        local = "LOCAL_WORLD_SIZE"
        num_local = _number(environment, local) if local in environment else None
        rank, local_rank, num = (_number(environment, name) for name in LAUNCHED)
        return Place(rank, local_rank, num, num_local, "torchrun")
    # Of the step, which srun alone sets: a batch script has the job's variables too, and is one process.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "RANK" not in environment:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        rank, local_rank, num = (_number(environment, name) for name in names)
        return Place(rank, local_rank, num, None, "srun")
    return ALONE


def check_processes(trainer: TrainerStage, place: Place) -> None:
    """Do the processes that were started fit the recipe?

    Raises:
        RunError: another number of them, or several machines without a launcher.
    """
    asked = f"trainer.devices = {trainer.devices}, trainer.num_nodes = {trainer.num_nodes}"
    if place.launched and place.num != trainer.num_processes:
        raise RunError(
            f"{asked}: {trainer.num_processes} processes, but {place.by} has started {place.num}; set trainer.devices "
            "to the processes of each machine and trainer.num_nodes to the machines, or start as many as it says"
        )
    if place.num_local is not None and place.launched and place.num_local != trainer.devices:
        raise RunError(
            f"{asked}, but {place.by} has started {place.num_local} processes on this machine; every machine must run "
            "trainer.devices of them"
        )
    if not place.launched and place.by == "person" and trainer.num_nodes > 1:
        raise RunError(
            f"{asked}: one process starts others on its own machine only; on each machine run torchrun "
            f"--nnodes {trainer.num_nodes} --nproc-per-node {trainer.devices} --rdzv-endpoint HOST:PORT "
            f"-m distill.train ..., or srun --nodes {trainer.num_nodes} --ntasks-per-node {trainer.devices} python "
            "-m distill.train ..."
        )


def as_torchrun(environment: MutableMapping[str, str], first_host: str, place: Place) -> None:
    """Puts srun's place into torchrun's names, which torch reads.

    Args:
        environment: gets the names.
        first_host: name of the machine of the first process.
        place: by srun.
    """
    job = environment.get("SLURM_JOB_ID", "0")
    environment.setdefault("MASTER_ADDR", first_host)
    environment.setdefault("MASTER_PORT", str(15_000 + int(job[-4:])))  # the same for all processes of a job
    environment.update(RANK=str(place.rank), LOCAL_RANK=str(place.local_rank), WORLD_SIZE=str(place.num))
    environment["GROUP_RANK"] = environment.get("SLURM_NODEID", "0")


class Board:
    """Where the first process of a launched run tells the others what to do; all of them must open it.

    Args:
        place: this process.

    Raises:
        RunError: not all of them came.
    """

    def __init__(self, place: Place) -> None:
        from torch.distributed import DistError, PrefixStore
        from torch.distributed.rendezvous import rendezvous

        self.place, self.told = place, False
        try:
            store, _, _ = next(rendezvous("env://", place.rank, place.num, timeout=MEET))
        except DistError as error:
            where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise RunError(f"the {place.num} processes of the run did not meet at {where}: {error}") from error
        self._store = PrefixStore("specdraft", store)

    def tell(self, run: Run | None, code: int = 0) -> None:
        """The first process: train in this run; or None: there is nothing to train, end with this code."""
        self.told = True
        folder = None if run is None else str(run.folder.absolute())
        self._store.set("run", json.dumps({"folder": folder, "attempt": run.attempt if run else 0, "code": code}))
        if run is None:  # the store may end with this process
            deadline = time.monotonic() + 5
            while self._store.add("read", 0) < self.place.num - 1 and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def listen(self) -> tuple[Run | None, int]:
        """The others: what the first one told; it may take as long as its answers do.

        Returns:
            The run to train in, or None and the exit code.

        Raises:
            RunError: the first process is gone, or its folder is not here.
        """
        from torch.distributed import DistError

        try:
            while not self._store.check(["run"]):  # a wait inside torch would not see a signal
                time.sleep(POLL_S)
            told: dict[str, Any] = json.loads(self._store.get("run"))
            self._store.add("read", 1)
        except DistError as error:
            raise RunError(f"the first process of the run is gone: {error}") from error
        if told["folder"] is None:
            return None, told["code"]
        folder = Path(told["folder"])
        if not folder.is_dir():
            raise RunError(
                f"{folder}, the run's folder, is not on this machine; output_dir must lie on a file system that all "
                "machines share"
            )
        return Run(folder, told["attempt"]), 0


@contextmanager
def others_told(run: Run, num_processes: int, place: Place) -> Iterator[None]:
    """While it lasts, processes that are started from this one know its run."""
    mine = num_processes > 1 and place.by == "person"
    told = {RUN_FOLDER: str(run.folder.absolute()), RUN_ATTEMPT: str(run.attempt)} if mine else {}
    os.environ |= told
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def own_run(environment: Mapping[str, str]) -> Run:
    """The run of a process that the first one has started."""
    return Run(Path(environment[RUN_FOLDER]), int(environment[RUN_ATTEMPT]))


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError) as error:
        raise RunError(
            f"{name} = {environment.get(name)!r} in the environment: must be a number, set by the launcher"
        ) from error
