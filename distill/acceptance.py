"""Teacher-forced acceptance of a draft on held-out answers, with its whole head and with the engine's shortlist.

At each supervised position, against the target's *whole* distribution p:

- greedy: does the draft's argmax (over its rows) equal the target's argmax over every row?
- sampled: sum over the draft's rows of min(p_j, q_j), both as they are served: after temperature, top-k and top-p, q
  being the softmax over those rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.loss_block import block_rows, capped, wide_dtype
from distill.schema_eval import Eval
from engine.warp import Warp, argmax, probabilities


@dataclass(frozen=True)
class TargetSummary:
    """What acceptance over a shortlist needs of the target's whole head.

    Attributes:
        best: [N] argmax.
        lse: [N] log partition function of the tokens that the target may draw.
        floor: [N] least of their logits, over the temperature; None where it may draw any.
    """

    best: Tensor
    lse: Tensor
    floor: Tensor | None


@dataclass(frozen=True)
class Acceptance:
    """One value per position [N]: greedy match (bool) and sum min(p, q) (float32), for the rows used."""

    match: Tensor
    alpha: Tensor


def served_warps(served: Eval) -> tuple[Warp, Warp]:
    """How target and draft draw when the draft is served; a draft temperature still to be fitted is the target's."""
    own = served.temperature if served.draft_temperature is None else served.draft_temperature
    return Warp(served.temperature, served.top_k, served.top_p), Warp(own, 0, served.draft_top_p)


@torch.no_grad()
def summarise_target(
    hidden: Tensor, weight: Tensor, warp: Warp, softcap: float | None = None, chunk_tok: int = 1024
) -> TargetSummary:
    """What the target may draw, by its whole head; the same for every validation, so keep it.

    Args:
        hidden: Final hidden states [N, H].
        weight: The target's whole head [V, H].
        warp: That is served, temperature > 0.
        softcap: Final logit soft cap, or None.
        chunk_tok: Positions whose logits live at a time.

    Returns:
        The columns [N] on the device of `hidden`.
    """
    best, lse, floor = [], [], []
    for chunk in hidden.split(chunk_tok):
        logits = chunk.to(weight.dtype) @ weight.T
        for y in logits.split(block_rows(logits)):
            last_bit = torch.finfo(y.dtype).eps
            y = capped(y.to(wide_dtype(y.dtype)), softcap)
            best.append(argmax(y))
            scaled = y / warp.temperature
            if _cuts(warp):
                least = scaled.masked_fill(_warped(y, warp) == 0, torch.inf).amin(-1)
                # A shortlist's product may round a logit otherwise, and ties are cut anyhow: what differs in the last
                # bit counts as drawn, in the partition function as well.
                floor.append(least - 2 * last_bit * least.abs())
                scaled.masked_fill_(scaled < floor[-1][:, None], -torch.inf)
            lse.append(scaled.logsumexp(-1))
    floors = _cat(floor, hidden, torch.float32) if _cuts(warp) else None
    return TargetSummary(_cat(best, hidden, torch.long), _cat(lse, hidden, torch.float32), floors)


@torch.no_grad()
def acceptance(
    hidden_draft: Tensor,
    weight_draft: Tensor,
    hidden_target: Tensor,
    weight_target: Tensor,
    summary: TargetSummary,
    ids: Tensor | None,
    warp: Warp,
    draft: Warp,
    softcaps: tuple[float | None, float | None] = (None, None),
    chunk_tok: int = 1024,
) -> Acceptance:
    """Teacher-forced acceptance per position for one set of draft rows.

    Args:
        hidden_draft: What the draft's head multiplies [N, h].
        weight_draft: The draft's head rows that are used [R, h].
        hidden_target: Final hidden states [N, H].
        weight_target: The same rows of the target's head [R, H].
        summary: `summarise_target` of the whole head, with the same warp.
        ids: Token ids of the rows [R] (the shortlist), or None when the rows are the whole head in order.
        warp: of the target as it is served, temperature > 0.
        draft: of the draft.
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
        columns = (logits_y, logits_z, _part(summary, at), summary.best[at])
        for y, z, kept, best in zip(*(column.split(rows) for column in columns)):
            y = capped(y.to(wide_dtype(y.dtype)), softcaps[0])
            z = capped(z.to(wide_dtype(z.dtype)), softcaps[1])
            top = argmax(z)
            match.append((top if ids is None else ids[top]) == best)
            alpha.append(torch.minimum(_drawn(y, warp, kept), _warped(z, draft)).sum(-1))
    return Acceptance(_cat(match, hidden_draft, torch.bool), _cat(alpha, hidden_draft, torch.float32))


@torch.no_grad()
def overlap_by_temperature(
    hidden_draft: Tensor,
    weight_draft: Tensor,
    hidden_target: Tensor,
    weight_target: Tensor,
    summary: TargetSummary,
    warp: Warp,
    drafts: Sequence[Warp],
    softcaps: tuple[float | None, float | None] = (None, None),
    chunk_tok: int = 1024,
) -> Tensor:
    """Sum over positions of sum min(p, q) for drafts that sample at other temperatures than the target.

    Args:
        hidden_draft, weight_draft, hidden_target, weight_target, summary, softcaps, chunk_tok: as for `acceptance`.
        warp: of the target, temperature > 0; that of the summary.
        drafts: D of them.

    Returns:
        [D] float64.
    """
    sums = torch.zeros(len(drafts), dtype=torch.float64)
    for start in range(0, hidden_draft.shape[0], chunk_tok):
        at = slice(start, start + chunk_tok)
        logits_z = hidden_draft[at].to(weight_draft.dtype) @ weight_draft.T
        logits_y = hidden_target[at].to(weight_target.dtype) @ weight_target.T
        columns = (logits_y, logits_z, _part(summary, at))
        for y, z, kept in zip(*(column.split(block_rows(logits_z)) for column in columns)):
            y = capped(y.to(wide_dtype(y.dtype)), softcaps[0])
            z = capped(z.to(wide_dtype(z.dtype)), softcaps[1])
            p = _drawn(y, warp, kept)
            for i, draft in enumerate(drafts):
                sums[i] += torch.minimum(p, _warped(z, draft)).sum().double().cpu()
    return sums


def _cuts(warp: Warp) -> bool:
    """Are there tokens that are never drawn?"""
    return warp.top_k > 0 or warp.top_p < 1


def _warped(logits: Tensor, warp: Warp) -> Tensor:
    """[c, R] probabilities that are drawn from."""
    if not _cuts(warp) and not warp.greedy:
        return (logits / warp.temperature).softmax(-1)
    temperature = torch.full((1,), warp.temperature, device=logits.device)
    draws = "greedy" if warp.greedy else "sampled"
    return probabilities(logits[None], temperature, warp.top_k, warp.top_p, draws)[0]


def _part(summary: TargetSummary, at: slice) -> Tensor:
    """[c, 2] log partition and floor of some positions."""
    lse = summary.lse[at]
    floor = torch.full_like(lse, -torch.inf) if summary.floor is None else summary.floor[at]
    return torch.stack([lse, floor], dim=-1)


def _drawn(logits: Tensor, warp: Warp, kept: Tensor) -> Tensor:
    """[c, R] the target's probabilities of some rows: logits, its warp, and `_part` of its summary."""
    scaled = logits / warp.temperature
    dropped = scaled < kept[:, 1:] if _cuts(warp) else None
    p = scaled.sub_(kept[:, :1]).exp_()
    return p if dropped is None else p.masked_fill_(dropped, 0.0)


def _cat(parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype, device=like.device)
