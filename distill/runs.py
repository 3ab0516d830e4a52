"""A run's folder: its files, its training checkpoints, and what a signal does to it. Knows no model."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from distill.files import write_json, write_text
from distill.recipe import Recipe, RecipeError, dump, load_recipe

log = logging.getLogger(__name__)

# What a resumed run may change: none of it alters a step that has been taken.
RESUMABLE = (
    *("distill.max_steps", "distill.checkpoint_every", "trainer.num_threads", "track"),
    # Where answers come from may move; the manifest of the answers pins the model's name and the sampler.
    *(f"responses.{key}" for key in ("server", "server_model", "concurrency", "retries", "timeout_s", "api_key_env")),
)


class RunError(ValueError):
    """A run folder that cannot be used as asked."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception: no handler for faults may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop:
    """Turns the first SIGINT or SIGTERM into an orderly stop.

    Outside training the signal raises `Interrupted` at once (everything written there is whole or absent). Inside a
    training loop (`deferred`) it only sets `signum`, so that the step is finished and saved; a second one raises.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.deferred = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first, self.signum = self.signum is None, signum
        if self.deferred and first:
            log.warning("%s: finishing the step, then saving a checkpoint", signal.Signals(signum).name)
            return
        raise Interrupted(signum)

    def install(self) -> None:
        """Makes this the handler (again: Lightning puts its own in place when a fit starts)."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, self._handle)

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Handles the signals in this block, and puts the former handlers back."""
        former = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        try:
            yield self
        finally:
            if threading.current_thread() is threading.main_thread():
                for signum, handler in former.items():
                    signal.signal(signum, handler)

    def check(self, found: int | None = None) -> None:
        """Raises `Interrupted` when a signal has arrived: `found` of all processes (0: none), or in this one."""
        if signum := self.signum if found is None else found:
            raise Interrupted(signum)


@dataclass(frozen=True)
class Run:
    """The files of one run.

    Attributes:
        folder: runs/<recipe>/<run id>.
        attempt: 0 for a fresh run, n for its n-th resumption.
    """

    folder: Path
    attempt: int = 0

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def responses(self) -> Path:
        """The target's answers to the training prompts."""
        return self.folder / "responses"

    @property
    def validation(self) -> Path:
        """The target's answers to held-out prompts."""
        return self.folder / "responses" / "heldout"

    @property
    def replay(self) -> Path:
        """What verification of the draft's own proposals computed (distill.replay)."""
        return self.folder / "replay"

    @property
    def plan(self) -> Path:
        """Measured costs."""
        return self.folder / "plan.json"

    @property
    def draft(self) -> Path:
        """The finished draft; absent until training has ended."""
        return self.folder / "draft"

    @property
    def last(self) -> Path:
        """The newest training checkpoint."""
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def previous(self) -> Path:
        """The one before it, kept in case the newest turns out to be broken."""
        return self.folder / "checkpoints" / "previous.ckpt"

    @property
    def best(self) -> Path:
        """Weights with the best predicted end-to-end speedup."""
        return self.folder / "checkpoints" / "best.ckpt"

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row to train.jsonl. Rows are never taken back: a repeated step has a higher `attempt`."""
        line = json.dumps({"attempt": self.attempt, **row})
        with (self.folder / "train.jsonl").open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            # A killed run may have left half a line, which must not swallow the next one.
            file.write((b"" if file.read(1) in (b"", b"\n") else b"\n") + line.encode() + b"\n")

    def save_last(self, save: Callable[[Path], None]) -> None:
        """Saves the newest checkpoint; the former newest becomes `previous` only once the new one is whole.

        Args:
            save: writes a checkpoint to the path it is given.
        """

        def keep_former() -> None:
            if self.last.exists():
                os.replace(self.last, self.previous)

        _write_whole(self.last, save, keep_former)

    def save_best(self, save: Callable[[Path], None]) -> None:
        """Saves the best weights, replacing the former best only when complete."""
        _write_whole(self.best, save)

    def newest_whole(self) -> Path | None:
        """The newest checkpoint that can be read, or None; says which files are broken."""
        for path in (self.last, self.previous):
            if not path.exists():
                continue
            if is_whole(path):
                return path
            log.warning("%s is cut or damaged: falling back to an older checkpoint", path)
        return None

    def is_linked(self) -> bool:
        """Does runs/<recipe>/latest point at this run or a later one?"""
        link = self.folder.parent / "latest"
        return link.is_symlink() and os.readlink(link) >= self.run_id

    def link_latest(self) -> None:
        """Points runs/<recipe>/latest at this run."""
        link = self.folder.parent / "latest"
        staging = self.folder.parent / f".latest-{self.run_id}"
        staging.unlink(missing_ok=True)
        staging.symlink_to(self.run_id)
        os.replace(staging, link)


def create_run(recipe: Recipe, provenance: Mapping[str, Any]) -> Run:
    """Makes a new run folder with recipe.json and provenance.json.

    Args:
        recipe: resolved recipe; the folder lies in `output_dir/name`.
        provenance: versions, commit, device, seeds.
    """
    parent = Path(recipe.output_dir) / recipe.name
    parent.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    number, folder = 1, parent / stamp
    while True:
        try:
            folder.mkdir()
            break
        except FileExistsError:  # two runs in one second
            number += 1
            folder = parent / f"{stamp}-{number}"
    write_json(folder / "provenance.json", provenance)
    write_text(folder / "recipe.json", dump(recipe))  # last: it makes the folder a run, and a release wants both
    return Run(folder)


def check_run(folder: Path) -> None:
    """Refuses (RunError) what is no run folder."""
    if not (folder / "recipe.json").is_file():
        what = "no recipe.json in it" if folder.is_dir() else "no such folder"
        raise RunError(f"--resume {folder}: {what}; give that of a run, runs/<recipe>/<run id>")


def reopen_run(folder: Path, recipe: Recipe, provenance: Mapping[str, Any]) -> Run:
    """Opens a run to go on with it.

    Args:
        folder: an existing run folder.
        recipe: the recipe to go on with; it may differ from the run's own only in `RESUMABLE`.
        provenance: of this resumption.

    Returns:
        The run, with its attempt counted up.

    Raises:
        RunError: not a run folder, or the recipes differ in a key that a resumed run must keep.
    """
    check_run(folder)
    path = folder / "recipe.json"
    try:
        former, wanted = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(json.loads(dump(recipe)))
    except ValueError as error:
        raise RunError(f"{path}: not JSON, so the run cannot go on: {error}; start a new one") from error
    with suppress(RecipeError):  # keys that a run of an older version has not yet got stand at their defaults
        former = _flat(json.loads(dump(load_recipe(path))))
    changed = sorted(key for key in former.keys() | wanted.keys() if former.get(key) != wanted.get(key))
    refused = [key for key in changed if not any(key == free or key.startswith(free + ".") for free in RESUMABLE)]
    if refused:
        lines = "\n".join(f"  {key}: the run has {former.get(key)!r}, asked for {wanted.get(key)!r}" for key in refused)
        raise RunError(f"--resume {folder}: keys that no resumed run can change; leave them and RECIPE out:\n{lines}")
    for key in changed:
        log.info("resume: %s: %r -> %r", key, former.get(key), wanted.get(key))
    # A process that was killed while it wrote leaves what nothing reads.
    for left in (*folder.glob("checkpoints/.*.ckpt-*"), *folder.glob(".draft-*"), *folder.glob("rounds/*/.draft-*")):
        log.info("removing %s, which is not whole", left)
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    attempt = 1 + len(list(folder.glob("provenance-*.json")))
    write_text(path, dump(recipe))
    write_json(folder / f"provenance-{attempt}.json", provenance)
    return Run(folder.resolve() if folder.is_symlink() else folder, attempt)


def is_whole(path: Path) -> bool:
    """Is this checkpoint complete? torch writes zip files: the index at the end, a checksum for every member."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError):
        return False


def _write_whole(path: Path, save: Callable[[Path], None], before: Callable[[], None] = lambda: None) -> None:
    """Writes beside the final name, checks, forces it to disk, then renames. A failed write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    staging = Path(name)
    try:
        save(staging)
        if not is_whole(staging):
            raise RunError(f"{path}: the checkpoint could not be written whole (disk full?); the older one is kept")
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        os.chmod(staging, 0o644)  # mkstemp makes it private
        before()
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: leaf
        for name, child in value.items()
        for key, leaf in _flat(child, f"{prefix}.{name}" if prefix else name).items()
    }
