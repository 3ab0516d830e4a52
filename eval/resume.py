"""Going on with an evaluation that was stopped: which rows count, and what was known after them. No torch.

run.json says what is measured and with what; progress.json how many rows of requests.jsonl belong to requests (or sets)
that were measured whole. Rows behind these are cut off, and their request is measured again, so that a resumed
evaluation has the rows of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from distill.files import read_object, write_json
from distill.recipe import Recipe
from eval.records import RequestRow
from eval.rowfile import cut_rows

RUN, ROWS, PROGRESS, REPORT = "run.json", "requests.jsonl", "progress.json", "report.json"
AGAIN = "; start a new evaluation"


class ResumeError(ValueError):
    """An evaluation that can not be gone on with."""


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is, written after every request.

    Attributes:
        rows: those of whole requests, warm-up included.
        used_s: seconds of the budget.
        policies: what each adaptive arm of the batch that is being measured has learnt, by the arm's name.
        paused_s: how long the process was stopped, each time.
        slept_s: how long the machine slept, each time.
    """

    rows: int = 0
    used_s: float = 0.0
    policies: Mapping[str, Any] = field(default_factory=dict)
    paused_s: Sequence[float] = ()
    slept_s: Sequence[float] = ()

    def save(self, folder: Path) -> None:
        write_json(folder / PROGRESS, asdict(self))


@dataclass(frozen=True)
class Stopped:
    """An evaluation as it was found.

    Attributes:
        run: run.json.
        progress: how far it came.
        rows: the whole ones.
    """

    run: dict[str, Any]
    progress: Progress
    rows: list[RequestRow]

    @property
    def measured(self) -> bool:
        """All rows are there; only the report is missing."""
        return "budget" in self.run["settings"]

    def done(self, batch: int) -> set[Any]:
        """Requests by id (at batch over 1: sets by number) that need not be measured any more."""
        mine = [row for row in self.rows if row.batch == batch and not row.warmup]
        return {row.request_id for row in mine} if batch == 1 else {row.set for row in mine}


def find_stopped(folder: Path) -> dict[str, Any]:
    """run.json of an evaluation.

    Raises:
        ResumeError: none there, or not what an evaluation wrote.
    """
    if not folder.is_dir():
        raise ResumeError(
            f"--resume {folder}: no such folder; give that of an evaluation, runs/<recipe>/<run>/eval/<id>"
        )
    path = folder / RUN
    if not path.is_file():
        raise ResumeError(
            f"--resume {folder}: no {RUN}: it stopped before its first request, or is no evaluation; there is nothing "
            "to go on with: remove the folder and start again"
        )
    run = read_object(path, ResumeError, remedy=AGAIN)
    mappings = ("recipe", "settings", "plan", "provenance", "drafts")
    missing = {*mappings, "requests_sha256"} - run.keys()
    wrong = [key for key in mappings if key in run and not isinstance(run[key], dict)]
    if not missing and not wrong and not all(isinstance(path, str) for path in run["drafts"].values()):
        wrong = ["drafts"]
    if not isinstance(run.get("resumed", []), list):
        wrong.append("resumed")
    if missing or wrong:
        what = f"without {', '.join(sorted(missing))}" if missing else f"{wrong[0]} is not as it was written"
        raise ResumeError(f"{path}: {what}: of another version, or damaged; start a new evaluation")
    return run


def recipe_of(folder: Path, run: Mapping[str, Any]) -> Recipe:
    """The recipe that an evaluation was started with.

    Raises:
        ResumeError: not one that this version takes.
    """
    try:
        return Recipe.model_validate_json(json.dumps(run["recipe"]))
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors()[:5])
        raise ResumeError(f"{folder / RUN}: its recipe is of another version, or damaged ({keys})") from error


def keep_whole(folder: Path, run: dict[str, Any]) -> Stopped:
    """Cuts off what a stopped evaluation did not finish, and gives back the rest.

    Raises:
        ResumeError: progress.json is missing or does not fit the rows.
        RowError: a damaged row.
    """
    path = folder / PROGRESS
    if not path.is_file():
        if (folder / ROWS).exists():
            raise ResumeError(f"{folder}: {ROWS} without {PROGRESS}, so what is whole is not known; start a new one")
        return Stopped(run, Progress(), [])
    try:
        progress = Progress(**read_object(path, ResumeError, remedy=AGAIN))
    except TypeError as error:
        raise ResumeError(f"{path}: not as an evaluation writes it ({error}); start a new one") from error
    good = type(progress.rows) is int and progress.rows >= 0 and type(progress.used_s) in (int, float)
    for pauses in (progress.paused_s, progress.slept_s):
        good = good and isinstance(pauses, list | tuple) and {*map(type, pauses)} <= {int, float}
    if not good or not isinstance(progress.policies, dict):
        raise ResumeError(f"{path}: not as an evaluation writes it; start a new one")
    kept = cut_rows(folder / ROWS, progress.rows) if progress.rows or (folder / ROWS).exists() else []
    return Stopped(run, progress, kept)


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Rows of two worlds do not mix.

    Args:
        folder: for the message.
        before, now: what must be equal, by name. What an older version did not tell before was empty.

    Raises:
        ResumeError: the first that differs.
    """
    for key, value in json.loads(json.dumps(now)).items():
        was = before.get(key, type(value)())
        if was != value:
            raise ResumeError(
                f"--resume {folder}: {key} was {_short(was)} and is {_short(value)} now: rows of the two "
                "can not stand in one report; put it back, or start a new evaluation"
            )


def requests_sha256(requests: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    """SHA-256 (hex) over ids, domains and tokens of the requests in their order."""
    whole = hashlib.sha256()
    for name, domain, ids in requests:
        whole.update(json.dumps([name, domain, list(ids)]).encode())
    return whole.hexdigest()


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
