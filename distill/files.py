"""Files: text and JSON written whole or not at all, JSON objects read with the reader's own error, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: beside its final name, then renamed. It ends in a newline."""
    staging = path.with_name(f".{path.name}.tmp")
    staging.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    os.replace(staging, path)


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Any], ascii_only: bool = True) -> None:
    """Writes JSON for people to read, as `write_text` does; other tools' own files keep their letters."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=ascii_only))


def read_object(
    path: Path, error: type[ValueError], what: str = "mapping of keys to values", flag: str = "", remedy: str = ""
) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Args:
        path: the file.
        error: to raise.
        what: the object is, for people.
        flag: of the command line, that named the file, with a space behind it.
        remedy: what to do, with what joins it to the message.

    Raises:
        error: not UTF-8, not JSON, nested too deeply, or no object.
        OSError: it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise error(f"{flag}{path}: not JSON ({fault}){remedy}") from fault
    if not isinstance(value, dict):
        raise error(f"{flag}{path}: a {type(value).__name__}, no {what}{remedy}")
    return value


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
