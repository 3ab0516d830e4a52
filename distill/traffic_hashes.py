"""What identifies the text a draft was trained on: hashes and names, never places. No torch."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.fields import matches
from distill.files import file_sha256
from distill.readers import is_hub_id


def traffic_hashes(run: Path, sources: str | Sequence[str]) -> dict[str, Any]:
    """What identifies the text a draft was trained on, without its places on this machine.

    Args:
        run: run folder.
        sources: `traffic.train` of the recipe.

    Returns:
        `train`: file names, with as many folders before them as tell them apart, bundled prompts and hub data sets as
        they are named; `train_sha256`: by these, null where a file is gone or is no file; `answers_sha256`: over the
        target's answers as they were trained on, null where the run keeps none.
    """
    hashes: dict[str, str | None] = {}
    files: list[Path] = []
    for source in [sources] if isinstance(sources, str) else sources:
        if source == "bundled" or is_hub_id(source):
            hashes[source] = None
        else:
            files += [path for path in matches(source) if path.is_file()] or [Path(os.path.expanduser(source))]
    hashes = {
        name: file_sha256(path) if path.is_file() else None for name, path in _short_names(files).items()
    } | hashes
    whole = hashlib.sha256()
    shards = sorted((run / "responses").glob("rows-*.jsonl"))
    for path in shards:
        whole.update(path.read_bytes())
    return {
        "train": list(hashes),
        "train_sha256": hashes,
        "answers_sha256": whole.hexdigest() if shards else None,
    }


def _short_names(files: Sequence[Path]) -> dict[str, Path]:
    """Each file by the shortest end of its path that no other has."""
    whole = list(dict.fromkeys(Path(os.path.abspath(path)) for path in files))
    names: dict[str, Path] = {}
    num = 0
    while whole:
        num += 1
        times = Counter(path.parts[-num:] for path in whole)
        names |= {str(Path(*path.parts[-num:])): path for path in whole if times[path.parts[-num:]] == 1}
        whole = [path for path in whole if times[path.parts[-num:]] > 1]
    return names
