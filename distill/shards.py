"""Answers on disk: shards, the manifest that names them, and what is read back of both.

A shard is a pair of files, `rows-NNNNN.jsonl` and `hidden-NNNNN.safetensors`; it counts only once the manifest names
it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
SHARD = ("shard", "rows", "tokens")  # whole numbers that the manifest holds of each shard


class ResponsesError(ValueError):
    """Answers on disk that can not be used as asked."""


@dataclass(frozen=True)
class ResponseRow:
    """One answered prompt; its hidden states are rows offset ... offset + num_states of the shard's tensor."""

    id: str
    domain: str
    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float
    finish: str
    reference: bool
    shard: int
    offset: int
    # What a server wrote also says where, after how many failures, whether the ids are the server's own, and else
    # whether it wrote the text in other ones.
    endpoint: str = ""
    retried: int = 0
    own_ids: bool = False
    recut: bool = False
    branches: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # see `distill.branches.Branch`

    @property
    def num_states(self) -> int:
        """Target states kept: of every answer token, then of every branch's."""
        return len(self.answer_ids) + sum(len(ids) for _, ids, _ in self.branches)


class ShardWriter:
    """A folder of answers that grows shard by shard, and goes on where it stopped.

    Rows lie in a shard in the order of the work, whatever the order they come in. A prompt is settled when a shard
    that the manifest names holds its answer, or why there is none; a shard is cut after so many settled prompts.

    Args:
        folder: gets the shards and manifest.json.
        settings: what the answers depend on.
        shard_rows: prompts that a shard settles.

    Attributes:
        manifest: as it was written last.
        num_rows, num_tok: answers so far and their tokens, those of the next shard included.

    Raises:
        ResponsesError: the folder holds answers made with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], shard_rows: int) -> None:
        self.folder, self.shard_rows = folder, shard_rows
        self.manifest = _resume(folder, settings)
        self._lines = [json.dumps(shard) for shard in self.manifest["shards"]]
        self.num_rows = sum(shard["rows"] for shard in self.manifest["shards"])
        self.num_tok = sum(shard["tokens"] for shard in self.manifest["shards"])
        self._rows: list[tuple[int, dict[str, Any], Tensor]] = []
        self._skipped: list[tuple[int, str, str]] = []

    def begin(self, asked: int, dropped: dict[str, int]) -> None:
        """Notes how many prompts are asked, and how many can not be, by reason."""
        self.manifest |= {"asked": asked, "dropped": dropped, "complete": False}

    def settled(self) -> Iterator[str]:
        """Ids of the prompts that need not be asked again."""
        for shard in self.manifest["shards"]:
            for row in _shard_rows(self.folder, shard):
                yield row.id
            for names in shard.get("skipped", {}).values():
                yield from names

    def keep(self, number: int, row: dict[str, Any], hidden: Tensor) -> None:
        """Takes an answer; `number` is its place in the work, `hidden` the target's states [A, H]."""
        self._rows.append((number, row, hidden))
        self.num_rows += 1
        self.num_tok += len(row["answer_ids"])
        self._cut()

    def skip(self, number: int, name: str, reason: str) -> None:
        """Notes that a prompt has no answer, and why."""
        self._skipped.append((number, name, reason))
        self._cut()

    def _cut(self) -> None:
        if len(self._rows) + len(self._skipped) >= self.shard_rows:
            self.flush()

    def flush(self) -> None:
        """Writes what is not in a shard yet as one.

        Raises:
            OSError: there is no room; what was written before stays whole.
        """
        if not (self._rows or self._skipped):
            return
        number = len(self.manifest["shards"])
        # Numbers differ, so rows are never compared.
        rows = [(row, hidden) for _, row, hidden in sorted(self._rows, key=lambda one: one[0])]
        shard: dict[str, Any] = {"shard": number, "rows": len(rows), "tokens": 0, "truncated": 0, "looped": 0}
        try:
            if rows:
                shard |= self._write([row for row, _ in rows], torch.cat([hidden for _, hidden in rows]), number)
            if self._skipped:
                shard["skipped"] = _by_reason(self._skipped)
            self.manifest["shards"].append(shard)
            self._lines.append(json.dumps(shard))
            self._write_manifest()
        except (OSError, SafetensorError) as error:
            raise self._no_room(number, error) from error
        self._rows, self._skipped = [], []

    def finish(self) -> dict[str, Any]:
        """Writes the last shard and marks the folder complete.

        Returns:
            The manifest.

        Raises:
            OSError: as `flush`.
        """
        self.flush()
        self.manifest |= {"answered": self.num_rows, "complete": True}
        self.manifest["dropped"] |= self.skipped()
        try:
            self._write_manifest()
        except OSError as error:
            raise self._no_room(len(self._lines), error) from error
        return self.manifest

    def skipped(self) -> dict[str, int]:
        """How many prompts have no answer, by reason."""
        counts = Counter({"empty": 0})
        for shard in self.manifest["shards"]:
            counts.update({reason: len(names) for reason, names in shard.get("skipped", {}).items()})
        return dict(counts)

    def _write(self, rows: list[dict[str, Any]], hidden: Tensor, number: int) -> dict[str, Any]:
        """Hidden states first, rows second (the manifest is last): a shard is there when the manifest says so."""
        states = hidden.to(torch.bfloat16).contiguous()
        with _replaced(self.folder / f"hidden-{number:05d}.safetensors") as path:
            save_file({"hidden": states}, path)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with _replaced(self.folder / f"rows-{number:05d}.jsonl") as path:
            path.write_text(text, encoding="utf-8")
        finishes = [row["finish"] for row in rows]
        facts: dict[str, Any] = {
            "tokens": int(states.shape[0]),
            "truncated": finishes.count("length"),
            "looped": finishes.count("loop"),
            "rows_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        if "endpoint" in rows[0]:
            facts |= {key: sum(row[key] for row in rows) for key in ("retried", "own_ids", "recut")}
            facts["endpoints"] = dict(Counter(row["endpoint"] for row in rows))
        return facts

    def _write_manifest(self) -> None:
        """One line a shard: a manifest of thousands of them is written after each."""
        head = json.dumps({key: value for key, value in self.manifest.items() if key != "shards"}, indent=2)
        shards = ",\n    ".join(self._lines)
        with _replaced(self.folder / "manifest.json") as path:
            path.write_text(f'{head[:-2]},\n  "shards": [\n    {shards}\n  ]\n}}\n', encoding="utf-8")

    def _no_room(self, number: int, error: Exception) -> OSError:
        # What the manifest does not name yet is worth less than the room it takes.
        for path in (*self.folder.glob(".*.tmp"), *self.folder.glob(f"*-{number:05d}.*")):
            path.unlink()
        free = shutil.disk_usage(self.folder).free
        kept = sum(shard["rows"] for shard in self.manifest["shards"][:number])
        return OSError(
            f"shard {number} could not be written to {self.folder} ({error}; {free / 1e6:.1f} MB free). The {kept} "
            f"answers of {number} shards before it are whole: make room on that disk (old runs are what may be deleted "
            "there), then go on with --resume"
        )


def _by_reason(skipped: list[tuple[int, str, str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for _, name, reason in sorted(skipped):
        names.setdefault(reason, []).append(name)
    return names


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when all went well."""
    temporary = path.with_name(f".{path.name}.tmp")
    yield temporary
    os.replace(temporary, path)


def _resume(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest to go on with: a new one, or the folder's own if its settings are the same."""
    path = folder / "manifest.json"
    if not path.exists():
        return {"format": FORMAT, "settings": settings, "shards": [], "complete": False}
    manifest = read_manifest(folder)
    old = manifest["settings"]
    changed = sorted(key for key in {*old, *settings} if old.get(key) != settings.get(key))
    if changed:
        lines = "\n".join(f"  {key}: {old.get(key)!r} there, {settings.get(key)!r} now" for key in changed)
        raise ResponsesError(f"{path} holds answers made with other settings:\n{lines}\nstart a new run, or delete it")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of answers.

    Raises:
        ResponsesError: there is none, it is no JSON, or it has another format.
    """
    path = folder / "manifest.json"
    if not path.exists():
        raise ResponsesError(f"{path} is not there; generate answers first")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResponsesError(f"{path} is no JSON ({error}); delete {folder} and generate the answers again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise ResponsesError(f"{path} has format {found!r}; this version reads {FORMAT}")
    settings, shards = manifest.get("settings"), manifest.get("shards")
    numbers = [shard.get(key) for shard in shards or () for key in SHARD] if _all_dicts(shards) else [None]
    if not isinstance(settings, dict) or any(type(number) is not int for number in numbers):
        raise ResponsesError(f"{path} is damaged; delete {folder} and generate the answers again")
    return manifest


def _all_dicts(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def load_rows(folder: Path) -> list[ResponseRow]:
    """Every row of the shards that the manifest names.

    Raises:
        ResponsesError: a shard is missing, cut, or disagrees with the manifest.
    """
    return [row for shard in read_manifest(folder)["shards"] for row in _shard_rows(folder, shard)]


def _shard_rows(folder: Path, shard: dict[str, Any]) -> list[ResponseRow]:
    if not shard["rows"]:
        return []  # none of its prompts has an answer, and it has no files
    path = folder / f"rows-{shard['shard']:05d}.jsonl"
    if not path.exists():
        raise ResponsesError(f"{path} is missing although the manifest names it; delete {folder} and start again")
    rows: list[ResponseRow] = []
    offset, data = 0, path.read_bytes()
    for number, line in enumerate(data.rstrip(b"\n").split(b"\n"), 1):
        try:
            row = ResponseRow(**json.loads(line), shard=shard["shard"], offset=offset)
        except (ValueError, TypeError) as error:
            raise ResponsesError(f"{path}:{number} is no response row: {error}") from error
        rows.append(row)
        offset += row.num_states
    expected = shard.get("rows_sha256")
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise ResponsesError(f"{path} is cut or was changed; delete {folder} and generate the answers again")
    if offset != shard["tokens"]:
        raise ResponsesError(f"{path} holds {offset} positions; the manifest says {shard['tokens']}")
    return rows
