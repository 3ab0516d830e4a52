"""What a report says of a draft before anything is measured: sizes, memory, what training found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from distill.checkpoint import Draft
from distill.models import SizeCount
from distill.shape import draft_size
from engine.cache import kv_bytes_per_token

# Names of validation's figures in draft.json, and what they are: teacher-forced acceptance.
FORCED = {"alpha": "argmax_match", "overlap": "sum_min_pq"}


def memory_of(model: PreTrainedModel, stored: int) -> dict[str, int]:
    """Bytes of the weights and of a token's KV.

    Args:
        model: target or draft.
        stored: its parameters.
    """
    return {
        "weights": stored * model.dtype.itemsize,
        "kv_per_tok": kv_bytes_per_token(model.config, model.dtype),
    }


def doubts(name: str, meta: Mapping[str, Any], target_sha256: str | None) -> Iterator[str]:
    """What should be known of a draft before it is measured: nothing is recorded of it, or it is of another target.

    Args:
        name: of the draft.
        meta: its draft.json; empty where there is none.
        target_sha256: of the target; None where that is not here.
    """
    if not meta:
        yield f"{name}: it has no draft.json: every row of its head is used, and what it was trained on is not known"
        return
    trained = (meta.get("target") or {}).get("sha256")
    if trained and target_sha256 and trained != target_sha256:
        yield (
            f"{name}: distilled from another target ({(meta.get('target') or {}).get('name', 'unnamed')}, sha256 "
            f"{trained[:12]}) than this one ({target_sha256[:12]}): it may accept less than a draft of this one"
        )


def about_draft(name: str, model: PreTrainedModel, draft: Draft, target: SizeCount, rows: int) -> dict[str, Any]:
    """A draft's entry in a report.

    Args:
        name: in the report.
        model, draft: its model and folder.
        target: the target's sizes.
        rows: of the target's head.
    """
    count = draft_size(
        model.config,
        None if draft.shortlist is None else draft.shortlist.numel(),
        None if draft.factors is None else draft.factors[1].shape[0],
    )
    return {
        "name": name,
        "stored_params": count.stored,
        "read_params": count.read,
        "stored_frac": count.stored / target.stored,
        "read_frac": count.read / target.read,
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "head_rows": rows if draft.shortlist is None else draft.shortlist.numel(),
        "trained_on": draft.meta.get("traffic"),
        "teacher_forced_alpha": teacher_forced(draft.meta.get("metrics") or {}),
        "weights_sha256": draft.meta.get("weights_sha256"),
    }


def teacher_forced(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Acceptance along the target's own text, by domain, as validation found it at the end of training.

    Args:
        metrics: of draft.json: "val/DOMAIN/alpha" is the share of positions where both say the same token,
            "val/DOMAIN/overlap" the mean of sum min(p, q).
    """
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        parts = key.split("/")
        if len(parts) == 3 and parts[0] == "val" and parts[2] in FORCED:
            found.setdefault(parts[1], {})[FORCED[parts[2]]] = value
    return found
