"""Answers on disk: shards, the manifest that names them, and what is read back of both.

A shard is a pair of files, `rows-NNNNN.jsonl` and `hidden-NNNNN.safetensors`; it counts only once the manifest names
it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
SHARD = ("shard", "rows", "tokens")  # whole numbers that the manifest holds of each shard


class ResponsesError(ValueError):
    """Answers on disk that can not be used as asked."""


@dataclass(frozen=True)
class ResponseRow:
    """One answered prompt; its hidden states are rows offset ... offset + len(answer_ids) of the shard's tensor."""

    id: str
    domain: str
    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float
    finish: str
    reference: bool
    shard: int
    offset: int
    endpoint: str = ""  # what a server wrote also says where, after how many failures, and if in other tokens
    retried: int = 0
    recut: bool = False


def resume(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest to go on with: a new one, or the folder's own if its settings are the same.

    Raises:
        ResponsesError: they are not, or the manifest can not be read.
    """
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


def write_shard(folder: Path, manifest: dict[str, Any], rows: list[dict[str, Any]], hidden: list[Tensor]) -> None:
    """Hidden states first, rows second, the manifest last: a shard is there when the manifest says so."""
    number = len(manifest["shards"])
    states = torch.cat(hidden).to(torch.bfloat16).contiguous()
    temporary = folder / f".hidden-{number:05d}.tmp"
    save_file({"hidden": states}, temporary)
    os.replace(temporary, folder / f"hidden-{number:05d}.safetensors")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    temporary = folder / f".rows-{number:05d}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / f"rows-{number:05d}.jsonl")
    finishes = [row["finish"] for row in rows]
    manifest["shards"].append(
        {
            "shard": number,
            "rows": len(rows),
            "tokens": int(states.shape[0]),
            "truncated": finishes.count("length"),
            "looped": finishes.count("loop"),
            "rows_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
    )
    if "endpoint" in rows[0]:
        counts = {key: sum(row[key] for row in rows) for key in ("retried", "recut")}
        manifest["shards"][-1] |= counts | {"endpoints": dict(Counter(row["endpoint"] for row in rows))}
    write_json(folder / "manifest.json", manifest)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2), encoding="utf-8")
    os.replace(temporary, path)


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
    rows: list[ResponseRow] = []
    for shard in read_manifest(folder)["shards"]:
        path = folder / f"rows-{shard['shard']:05d}.jsonl"
        if not path.exists():
            raise ResponsesError(f"{path} is missing although the manifest names it; delete {folder} and start again")
        offset, data = 0, path.read_bytes()
        for number, line in enumerate(data.rstrip(b"\n").split(b"\n"), 1):
            try:
                record = json.loads(line)
                row = ResponseRow(**record, shard=shard["shard"], offset=offset)
            except (ValueError, TypeError) as error:
                raise ResponsesError(f"{path}:{number} is no response row: {error}") from error
            rows.append(row)
            offset += len(row.answer_ids)
        expected = shard.get("rows_sha256")
        if expected is not None and hashlib.sha256(data).hexdigest() != expected:
            raise ResponsesError(f"{path} is cut or was changed; delete {folder} and generate the answers again")
        if offset != shard["tokens"]:
            raise ResponsesError(f"{path} holds {offset} answer tokens; the manifest says {shard['tokens']}")
    return rows
