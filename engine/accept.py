"""The acceptance rule of speculative sampling. Pure functions of probabilities, proposals and uniforms."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.warp import draw


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
    batch, k = proposed.shape
    p_of = p[:, :k].gather(2, proposed[..., None])[..., 0]
    if q is None:
        q_of = torch.ones_like(p_of)
    else:
        column = proposed if rows is None else torch.searchsorted(rows, proposed)
        q_of = q.gather(2, column[..., None])[..., 0]
    # u < p/q without the division: q of a drawn token is over 0, but p/q may overflow.
    keep = u_accept * q_of.double() < p_of.double()
    if count is not None:
        keep = keep & (torch.arange(k, device=keep.device) < count[:, None])
    accepted = keep.long().cumprod(1).sum(1)
    final_p = p.gather(1, accepted[:, None, None].expand(batch, 1, p.shape[2]))[:, 0]
    limit = torch.full_like(accepted, k) if count is None else count
    rejected = accepted < limit
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
        final_p = torch.where(rejected[:, None], residual(final_p, final_q), final_p)
    return accepted, draw(final_p, u_final.gather(1, accepted[:, None])[:, 0])
