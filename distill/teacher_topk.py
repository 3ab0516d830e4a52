"""The target's likeliest tokens beside its cached states: a file topk-NNNNN.safetensors for each shard of them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from distill.loss_topk import TopK, top_k
from distill.shards import ResponsesError, read_manifest

log = logging.getLogger(__name__)


def write_topk(folder: Path, weight: Tensor, k: int, softcap: float | None = None) -> None:
    """Turns every shard of hidden states into the k likeliest tokens; shards that have as many are left alone.

    Args:
        folder: of answers.
        weight: rows [V, H] of the target's head that the draft's has too.
        k: tokens to keep; no more than V.
        softcap: the target's final logit soft cap, or None.

    Raises:
        ResponsesError: k is more than the head has rows, or a shard is missing or broken.
    """
    check_topk(k, weight.shape[0])
    written = states = 0
    for shard in read_manifest(folder)["shards"]:
        if not shard["rows"]:
            continue
        path, source = topk_path(folder, shard["shard"]), folder / f"hidden-{shard['shard']:05d}.safetensors"
        try:
            kept = read_topk(path).ids if path.exists() else None
            if kept is None or kept.shape != (shard["tokens"], k) or int(kept.max()) >= len(weight):
                with safe_open(source, framework="pt") as file:
                    hidden = file.get_tensor("hidden")
                few = top_k(hidden.to(weight.device), weight, k, softcap)
                staging = path.with_name(f".{path.name}.tmp")
                save_file({"ids": few.ids.cpu(), "log_p": few.log_p.float().cpu()}, staging)
                os.replace(staging, path)
        except (SafetensorError, FileNotFoundError) as error:
            raise ResponsesError(f"{source} or {path}: {error}; delete {folder} and start again") from error
        written, states = written + path.stat().st_size, states + source.stat().st_size
    log.info("top-%d of the target: %.1f MB on disk (its hidden states: %.1f MB)", k, written / 1e6, states / 1e6)


def check_topk(k: int, rows: int) -> None:
    """Raises ResponsesError for more tokens than the heads of target and draft have rows."""
    if k > rows:
        raise ResponsesError(f"distill.teacher_topk = {k}: target and draft share {rows} rows of the head; lower it")


def topk_path(folder: Path, shard: int) -> Path:
    """Where a shard's likeliest tokens lie."""
    return folder / f"topk-{shard:05d}.safetensors"


def read_topk(path: Path) -> TopK:
    """The likeliest tokens of a shard, mapped and not read.

    Raises:
        SafetensorError, FileNotFoundError: broken or missing.
    """
    with safe_open(path, framework="pt") as file:
        return TopK(file.get_tensor("ids"), file.get_tensor("log_p"))
