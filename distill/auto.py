"""What `auto` stands for in target.dtype and trainer.precision. No torch is asked: a recipe that was read is whole."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from distill.fields import Stage
from distill.schema import Recipe

T = TypeVar("T", bound=Stage)


def settle(recipe: Recipe, bf16: bool | None = None) -> Recipe:
    """The recipe with number formats in place of `auto`: bf16, or float32 on a CPU that has no bf16 products.

    Measured with AVX2 alone: 1,024 rows times 576 x 1,536 weights take 106 ms in bf16, 15 in float32.

    Args:
        recipe: as it was written.
        bf16: does this machine have bf16 products? None asks it.
    """
    trainer = recipe.trainer
    if "auto" not in (recipe.target.dtype, trainer.precision):
        return recipe
    if bf16 is None:
        elsewhere = trainer.gpu is not None or trainer.accelerator == "cuda"
        bf16 = elsewhere or (trainer.accelerator == "auto" and has_gpu()) or cpu_has_bf16()
    stages: dict[str, Stage] = {}
    if recipe.target.dtype == "auto":
        stages["target"] = _with(recipe.target, dtype="bfloat16" if bf16 else "float32")
    if trainer.precision == "auto":
        stages["trainer"] = _with(trainer, precision="bf16-mixed" if bf16 else "32-true")
    return _with(recipe, **stages)


def _with(stage: T, **values: object) -> T:
    """A copy with other values that does not take them for given: what is written from it leaves them to `auto`."""
    copied = stage.model_copy(update=values)
    copied.model_fields_set.intersection_update(stage.model_fields_set - {"dtype", "precision"})
    return copied


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Has oneDNN bf16 products for this CPU, as `engine.pack.cpu_has_bf16` asks it? No where the file is not there."""
    try:
        lines = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return False
    flags = set() if lines is None else set(lines[1].split())
    return "bf16" in flags or {"avx512bw", "avx512vl", "avx512dq"} <= flags


def has_gpu(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> bool:
    """Is there an NVIDIA GPU that this process may see?"""
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()  # the latter in a Linux under Windows
