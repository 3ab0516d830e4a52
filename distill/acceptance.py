"""Teacher-forced acceptance of a draft on held-out answers, with its whole head and with the engine's shortlist.

At each supervised position, against the target's *whole* distribution p:

- greedy: does the draft's argmax (over its rows) equal the target's argmax over every row?
- sampled: sum over the draft's rows of min(p_j, q_j), q being the softmax over those rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.loss_block import block_rows, capped, wide_dtype
from engine.warp import argmax


@dataclass(frozen=True)
class TargetSummary:
    """What acceptance over a shortlist needs of the target's whole head: `best` [N] argmax, `lse` [N] log partition."""

    best: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Acceptance:
    """One value per position [N]: greedy match (bool) and sum min(p, q) (float32), for the rows used."""

    match: Tensor
    alpha: Tensor


@torch.no_grad()
def summarise_target(
    hidden: Tensor, weight: Tensor, temperature: float = 1.0, softcap: float | None = None, chunk_tok: int = 1024
) -> TargetSummary:
    """Argmax and log partition function of the target's whole head; the same for every validation, so keep it.

    Args:
        hidden: Final hidden states [N, H].
        weight: The target's whole head [V, H].
        temperature: Softmax temperature that is served, > 0.
        softcap: Final logit soft cap, or None.
        chunk_tok: Positions whose logits live at a time.

    Returns:
        The two columns [N] on the device of `hidden`.
    """
    best, lse = [], []
    for chunk in hidden.split(chunk_tok):
        logits = chunk.to(weight.dtype) @ weight.T
        for y in logits.split(block_rows(logits)):
            y = capped(y.to(wide_dtype(y.dtype)), softcap)
            best.append(argmax(y))
            lse.append((y / temperature).logsumexp(-1))
    return TargetSummary(_cat(best, hidden, torch.long), _cat(lse, hidden, torch.float32))


@torch.no_grad()
def acceptance(
    hidden_draft: Tensor,
    weight_draft: Tensor,
    hidden_target: Tensor,
    weight_target: Tensor,
    summary: TargetSummary,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    softcaps: tuple[float | None, float | None] = (None, None),
    chunk_tok: int = 1024,
) -> Acceptance:
    """Teacher-forced acceptance per position for one set of draft rows.

    Args:
        hidden_draft: What the draft's head multiplies [N, h].
        weight_draft: The draft's head rows that are used [R, h].
        hidden_target: Final hidden states [N, H].
        weight_target: The same rows of the target's head [R, H].
        summary: `summarise_target` of the whole head, at the same temperature.
        ids: Token ids of the rows [R] (the shortlist), or None when the rows are the whole head in order.
        temperature: Softmax temperature of both that is served, > 0.
        softcaps: Final logit soft cap of (target, draft).
        chunk_tok: Positions whose logits live at a time.

    Returns:
        Match and sum min(p, q) per position.
    """
    match, alpha = [], []
    for start in range(0, hidden_draft.shape[0], chunk_tok):
        at = slice(start, start + chunk_tok)
        logits_z = hidden_draft[at].to(weight_draft.dtype) @ weight_draft.T
        logits_y = hidden_target[at].to(weight_target.dtype) @ weight_target.T
        rows = block_rows(logits_z)
        columns = (logits_y, logits_z, summary.lse[at], summary.best[at])
        for y, z, lse, best in zip(*(column.split(rows) for column in columns)):
            y = capped(y.to(wide_dtype(y.dtype)), softcaps[0])
            z = capped(z.to(wide_dtype(z.dtype)), softcaps[1])
            top = argmax(z)
            match.append((top if ids is None else ids[top]) == best)
            p = (y / temperature).sub_(lse[:, None]).exp_()
            alpha.append(torch.minimum(p, (z / temperature).softmax(-1)).sum(-1))
    return Acceptance(_cat(match, hidden_draft, torch.bool), _cat(alpha, hidden_draft, torch.float32))


@torch.no_grad()
def overlap_by_temperature(
    hidden_draft: Tensor,
    weight_draft: Tensor,
    hidden_target: Tensor,
    weight_target: Tensor,
    summary: TargetSummary,
    temperature: float,
    draft_temperatures: Sequence[float],
    softcaps: tuple[float | None, float | None] = (None, None),
    chunk_tok: int = 1024,
) -> Tensor:
    """Sum over positions of sum min(p, q) when the draft samples at other temperatures than the target.

    Args:
        hidden_draft, weight_draft, hidden_target, weight_target, summary, softcaps, chunk_tok: as for `acceptance`.
        temperature: of the target, > 0; that of the summary.
        draft_temperatures: D of them, each > 0.

    Returns:
        [D] float64.
    """
    sums = torch.zeros(len(draft_temperatures), dtype=torch.float64)
    for start in range(0, hidden_draft.shape[0], chunk_tok):
        at = slice(start, start + chunk_tok)
        logits_z = hidden_draft[at].to(weight_draft.dtype) @ weight_draft.T
        logits_y = hidden_target[at].to(weight_target.dtype) @ weight_target.T
        columns = (logits_y, logits_z, summary.lse[at])
        for y, z, lse in zip(*(column.split(block_rows(logits_z)) for column in columns)):
            y = capped(y.to(wide_dtype(y.dtype)), softcaps[0])
            z = capped(z.to(wide_dtype(z.dtype)), softcaps[1])
            p = (y / temperature).sub_(lse[:, None]).exp_()
            for i, other in enumerate(draft_temperatures):
                sums[i] += torch.minimum(p, (z / other).softmax(-1)).sum().double().cpu()
    return sums


def _cat(parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype, device=like.device)
