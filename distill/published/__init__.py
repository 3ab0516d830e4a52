"""Published facts that need no weights: config.json of some large targets, and data sheets of devices. No torch.

A file here holds `models` (hub ids, each with what is its own), `config` (what transformers reads), `source` (where the
numbers were copied from) and `published` (sizes that the makers state, for tests).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DEVICES = FOLDER / "devices.json"


def published_config(name: str) -> dict[str, Any] | None:
    """The config.json of a large target by its hub id, or None where none is kept here.

    Args:
        name: hub id, such as Qwen/Qwen3-8B.
    """
    for facts in read_all():
        if name in facts["models"]:
            return {**facts["config"], **facts["models"][name]}
    return None


def read_all() -> list[dict[str, Any]]:
    """Every file of a target, in order of name."""
    paths = sorted(path for path in FOLDER.glob("*.json") if path != DEVICES)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
