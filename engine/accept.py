"""The acceptance rule of speculative sampling. Pure functions of probabilities, proposals and uniforms."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.warp import draw


def with_room(length: Tensor, limit: Tensor, most: int, count: Tensor | None = None) -> Tensor:
    """How many proposals of each row count: no more than it has room for, whatever the rows beside it have.

    The last token that fits is never a proposal. So a row's cycles, and the noise that its samples take, are those that
    it has alone. (What it is proposed beyond wastes time, which the clock sees.)

    Args:
        length, limit: [B] tokens of each row so far, and at its end.
        most: proposals of the cycle.
        count: [B] how many of them are real; None is all.

    Returns:
        [B] in 0..most.
    """
    room = (limit - length - 1).clamp(0, most)
    return room if count is None else torch.minimum(room, count)


def accept_greedy(proposed: Tensor, best: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Accepts the longest prefix of the proposals that equals the target's argmax.

    Args:
        proposed: [B, k] drafted token ids.
        best: [B, k + 1] the target's argmax after each prefix.
        count: [B] how many of a row's proposals are real (a look-up may find fewer); None is all.

    Returns:
        accepted [B] in 0..k and the correction or bonus token [B].
    """
    agree = proposed == best[:, :-1]
    if count is not None:
        agree = agree & (torch.arange(agree.shape[1], device=agree.device) < count[:, None])
    accepted = agree.long().cumprod(1).sum(1)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution of the token that replaces a rejected one: (p - q)+ normalised.

    Satisfies min(p, q) + (1 - sum min(p, q)) * residual = p, which is why the output follows p exactly.

    Args:
        p, q: [..., V] probabilities over the same tokens.

    Returns:
        [..., V]; where p equals q (nothing can be rejected) p itself.

    Source: Leviathan et al., arXiv 2211.17192, section 2.3; Chen et al., arXiv 2302.01318, algorithm 2.
    """
    left = (p - q).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp(min=torch.finfo(left.dtype).tiny), p)


def accept_sampled(
    p: Tensor,
    q: Tensor | None,
    proposed: Tensor,
    u_accept: Tensor,
    u_final: Tensor,
    rows: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token-wise rejection sampling: keep d_j with probability min(1, p(d_j) / q(d_j)), else draw from the residual.

    Args:
        p: [B, k + 1, V] the target's probabilities, warped as served.
        q: [B, k, R] the distributions that `proposed` was drawn from; None: the proposals are deterministic (q is
            one-hot at the proposal).
        proposed: [B, k] token ids in the target's vocabulary.
        u_accept: [B, k] uniforms.
        u_final: [B, k + 1] uniforms for the token that follows j accepted ones.
        rows: [R] token id of each column of q; None: R columns are the ids 0..R-1.
        count: [B] how many proposals of a row are real; None is all.

    Returns:
        accepted [B] and the token that follows [B].

    Source: arXiv 2211.17192, algorithm 1.
    """
    k = proposed.shape[1]
    p_of, q_of = _of_proposals(p, q, proposed, rows)
    # u < p/q without the division: q of a drawn token is over 0, but p/q may overflow.
    keep = u_accept * q_of < p_of
    if count is not None:
        keep = keep & (torch.arange(k, device=keep.device) < count[:, None])
    accepted = keep.long().cumprod(1).sum(1)
    weight = torch.ones(p.shape[0], k + 1, device=p.device)
    return accepted, _final(p, q, proposed, accepted, weight, u_final, rows, count)


def accept_block(
    p: Tensor,
    q: Tensor | None,
    proposed: Tensor,
    u_accept: Tensor,
    u_final: Tensor,
    rows: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Block verification: the proposals are judged together, and no rule accepts more of them on average.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(d_i) / q(d_i)), the block's first i tokens are kept where u_i < h_i, for
    the largest such i: h_k = w_k, and before that h_i = S_i / (S_i + 1 - w_i), S_i = sum (w_i p - q)+ over the tokens
    that may follow d_1 ... d_i. What follows i < k kept tokens is drawn from (w_i p - q)+ normalised.

    A decision reads draws past the place where the block ends, so that no draw may be used in a later cycle again.

    Args: as for `accept_sampled`.

    Returns:
        accepted [B] and the token that follows [B].

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2.
    """
    batch, k = proposed.shape
    p_of, q_of = _of_proposals(p, q, proposed, rows)
    weight = torch.ones(batch, k + 1, dtype=torch.float64, device=p.device)
    for i in range(k):
        weight[:, i + 1] = (weight[:, i] * p_of[:, i] / q_of[:, i]).clamp_(max=1.0)
    last = torch.full((batch,), k, device=p.device) if count is None else count
    accepted = torch.zeros(batch, dtype=torch.long, device=p.device)
    for i in range(1, k + 1):
        kept = weight[:, i]
        if i < k:
            gain = _surplus(p[:, i], None if q is None else q[:, i], proposed[:, i], kept, rows)
            both = gain + 1 - kept
            # 0 / 0: draft and target agree on everything that may follow a block that is surely kept.
            chance = torch.where(both > 0, gain / both.clamp(min=torch.finfo(both.dtype).tiny), torch.ones_like(both))
            kept = torch.where(last == i, kept, chance)
        accepted = torch.where((u_accept[:, i - 1] < kept) & (i <= last), i, accepted)
    return accepted, _final(p, q, proposed, accepted, weight, u_final, rows, count)


def _of_proposals(p: Tensor, q: Tensor | None, proposed: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, k] float64: what target and draft gave to the proposed tokens."""
    p_of = p[:, : proposed.shape[1]].gather(2, proposed[..., None])[..., 0].double()
    if q is None:
        return p_of, torch.ones_like(p_of)
    column = proposed if rows is None else torch.searchsorted(rows, proposed)
    return p_of, q.gather(2, column[..., None])[..., 0].double()


def _surplus(p: Tensor, q: Tensor | None, proposed: Tensor, weight: Tensor, rows: Tensor | None) -> Tensor:
    """[B] float64: sum over the vocabulary of (weight * p - q)+, for p [B, V] and the proposals [B] drawn from q."""
    if q is None:
        of = p.gather(1, proposed[:, None])[:, 0].double()
        return weight * (p.sum(1).double() - of) + (weight * of - 1).clamp_(min=0)
    same = p[:, : q.shape[1]] if rows is None else p[:, rows]
    inside = (weight[:, None] * same - q[:, : same.shape[1]]).clamp_(min=0).sum(1)
    return inside + weight * (p.sum(1) - same.sum(1)).clamp_(min=0)


def _final(
    p: Tensor,
    q: Tensor | None,
    proposed: Tensor,
    accepted: Tensor,
    weight: Tensor,
    u_final: Tensor,
    rows: Tensor | None,
    count: Tensor | None,
) -> Tensor:
    """The token [B] that follows: a bonus where all were accepted, else from the residual (weight * p - q)+."""
    batch, k = proposed.shape
    final_p = p.gather(1, accepted[:, None, None].expand(batch, 1, p.shape[2]))[:, 0]
    rejected = accepted < (torch.full_like(accepted, k) if count is None else count)
    if k > 0:  # computed even where nothing was rejected: asking would wait for the device
        place = accepted.clamp(max=k - 1)
        final_q = torch.zeros_like(final_p)
        if q is None:
            final_q.scatter_(1, proposed.gather(1, place[:, None]), 1.0)
        else:
            there = q.gather(1, place[:, None, None].expand(batch, 1, q.shape[2]))[:, 0]
            if rows is None:
                final_q[:, : there.shape[1]] = there[:, : final_q.shape[1]]
            else:
                final_q[:, rows] = there
        scaled = final_p * weight.gather(1, accepted[:, None]).to(final_p.dtype)
        final_p = torch.where(rejected[:, None], residual(scaled, final_q), final_p)
    return draw(final_p, u_final.gather(1, accepted[:, None])[:, 0])
