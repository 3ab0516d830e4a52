"""A file of rows: one JSON object a line under a line that names the format. No torch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from eval.records import RequestRow, RowError

log = logging.getLogger(__name__)

FORMAT = 3


def append_rows(path: str | Path, rows: Iterable[RequestRow]) -> None:
    """Appends rows to a JSONL file; a new file first gets the line that names the format.

    What a killed run left half-written at the end is cut off first, so that the file stays readable.

    Args:
        path: requests.jsonl of an evaluation.
        rows: any number.
    """
    path = Path(path)
    with path.open("ab+") as raw:
        raw.seek(max(0, raw.seek(0, os.SEEK_END) - 1))
        if raw.read(1) not in (b"", b"\n"):
            raw.seek(0)
            raw.truncate(raw.read().rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        if path.stat().st_size == 0:
            file.write(json.dumps({"format": FORMAT, "holds": "request rows"}) + "\n")
        for row in rows:
            file.write(json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) + "\n")


def read_rows(path: str | Path) -> list[RequestRow]:
    """Reads a file of rows; a last line that a killed run left half-written is dropped with a warning.

    Args:
        path: requests.jsonl of an evaluation.

    Returns:
        rows in the order of the file.

    Raises:
        RowError: file, line and what is wrong with it.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = text.split("\n")
    if lines[-1]:
        log.warning("%s: line %d was left half-written and is dropped", path, len(lines))
    whole = lines[:-1]
    if not whole:
        raise RowError(f"{path}: no whole line; expected the format line and rows")
    head = _parse(path, 1, whole[0])
    if head.get("format") != FORMAT:
        raise RowError(f"{path}, line 1: format is {head.get('format')!r}; this version reads format {FORMAT}")
    known = {f.name for f in fields(RequestRow)}
    rows = []
    for number, line in enumerate(whole[1:], start=2):
        data = _parse(path, number, line)
        if set(data) != known:
            unknown, missing = sorted(set(data) - known), sorted(known - set(data))
            raise RowError(f"{path}, line {number}: unknown fields {unknown}, missing {missing}")
        try:
            rows.append(RequestRow(**data))
        except (RowError, TypeError) as fault:
            raise RowError(f"{path}, line {number}: {fault}") from fault
    return rows


def cut_rows(path: Path, num: int) -> list[RequestRow]:
    """Cuts a file off behind its first rows, and reads these.

    Args:
        path: requests.jsonl of an evaluation.
        num: rows to keep; with 0 the file goes.

    Raises:
        RowError: there are fewer, or one is damaged.
    """
    if num == 0:
        path.unlink(missing_ok=True)
        return []
    with path.open("rb+") as raw:
        lines = raw.read().split(b"\n")[: num + 1 + 1]
        if len(lines) < num + 2:
            raise RowError(f"{path}: {max(0, len(lines) - 2)} whole rows, where {num} were written: rows were lost")
        raw.truncate(sum(len(line) + 1 for line in lines[:-1]))
    return read_rows(path)


def _parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as fault:
        raise RowError(f"{path}, line {number}: not JSON ({fault.msg} at column {fault.colno})") from fault
    if not isinstance(data, dict):
        raise RowError(f"{path}, line {number}: a {type(data).__name__}; each line holds one object")
    return data
