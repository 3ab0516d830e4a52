"""What a run was made with: code, versions, machine, seed, command. Imports no torch."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "specdraft", "torch", "transformers", "tokenizers", "safetensors", "lightning", "datasets", "peft", "wandb",
    "numpy", "pyarrow", "pydantic", "gguf",
)  # fmt: skip


def collect(seed: int, device: str | None = None) -> dict[str, Any]:
    """Gathers what is needed to repeat a run, or to see why it cannot be repeated.

    Args:
        seed: the recipe's.
        device: name of the device that did the work, where it is not the CPU.

    Returns:
        JSON-ready values: git (commit, dirty; null outside a checkout), versions (null for what is not installed),
        python, platform, cpu, cores (of the machine, and usable by this process), device, seed, command, time (UTC).
    """
    return {
        "git": _git(Path(__file__).parent),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": {"machine": os.cpu_count(), "usable": _usable_cores()},
        "device": device or "cpu",
        "seed": seed,
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and state of the checkout that this file lies in; None when installed elsewhere or git is missing."""

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside a foreign repository: only a checkout that tracks this file counts.
    if ask("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changes = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's model name; Linux tells it in a file only."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
