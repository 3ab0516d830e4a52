"""The text part of a checkpoint that also sees images, as an ordinary causal LM in the cache folder, written once.

A draft speaks, it does not see. The tensors are copied under the names of the text model's own class and not changed;
what belongs to the images is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from distill.convert import SOURCE, VERSION, is_whole, lock
from distill.known import cache_dir, text_settings

log = logging.getLogger(__name__)

# Where the text model's tensors stand: as on the hub, and as transformers 5 writes them.
PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
COPIED = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json", "LICENSE*")


def text_part(folder: Path) -> Path:
    """The folder itself, or for a model that also sees images the folder of its text part, written once.

    Args:
        folder: a checkpoint with config.json and safetensors files.
    """
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = text_settings(settings)
    if text is None:
        return folder
    shards = [(path.name, path.stat().st_size) for path in sorted(folder.glob("*.safetensors"))]
    state = json.dumps([settings, shards], sort_keys=True)
    target = cache_dir() / f"text-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    with lock(target):
        if not is_whole(target):
            _write(folder, text, target)
    return target


def text_name(name: str) -> str | None:
    """A tensor's name in the text model; None for what is not of it."""
    for old, new in PREFIXES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name if name.startswith("lm_head.") else None


def _write(folder: Path, text: dict[str, Any], target: Path) -> None:
    """Writes the text part beside its final place and renames it."""
    log.info("%s also sees images: its text part goes to %s (once)", folder, target)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as parent:
        staging = Path(parent) / "model"
        staging.mkdir()
        places: dict[str, str] = {}
        size = 0
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, framework="pt") as file:
                names = {name: new for name in file.keys() if (new := text_name(name)) is not None}  # noqa: SIM118
                tensors = {new: file.get_tensor(name) for name, new in names.items()}
            if tensors:
                save_file(tensors, staging / shard.name, metadata={"format": "pt"})
                places |= dict.fromkeys(tensors, shard.name)
                size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if len(set(places.values())) > 1 or "model.safetensors" not in places.values():
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
            (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        (staging / "config.json").write_text(json.dumps(text, indent=2), encoding="utf-8")
        for pattern in COPIED:
            for path in folder.glob(pattern):
                shutil.copy(path, staging / path.name)
        files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
        record = {"converter": VERSION, "text_of": str(folder), "files": files}
        (staging / SOURCE).write_text(json.dumps(record, indent=2), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        os.replace(staging, target)
