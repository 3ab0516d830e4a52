"""Losses against the target's k likeliest tokens and the mass of all others, which is one category for both models.

All losses of `distill.losses` are taken over k + 1 categories. With P and Q the two masses of the rest, the divergences
among them (the KLs, jsd, tv, neg_log_alpha) are at most those over all rows, by the data processing inequality, and
alpha is at least the whole one. What is missing is
    forward KL: P * KL(p given rest || q given rest);    TV: at most min(P, Q);
for k = V nothing is. cross_entropy is exact for every k. The gradient pushes the rest as a whole and does not order the
tokens in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill.loss_block import BlockSettings, block, block_rows, capped, wide_dtype
from engine.warp import argmax


@dataclass(frozen=True)
class TopK:
    """The target at each position, at temperature 1.

    Attributes:
        ids: [N, k] the likeliest tokens, the first one first.
        log_p: [N, k + 1] their log probabilities and that of all others together; -inf there only for k = V.
    """

    ids: Tensor
    log_p: Tensor

    def __getitem__(self, at: slice | Tensor) -> TopK:
        return self.map(lambda tensor: tensor[at])

    def map(self, function: Callable[[Tensor], Tensor]) -> TopK:
        """The same change to both."""
        return TopK(function(self.ids), function(self.log_p))


@torch.no_grad()
def top_k(hidden: Tensor, weight: Tensor, k: int, softcap: float | None = None, chunk_tok: int = 1024) -> TopK:
    """The k likeliest tokens of a head, with the mass of the rest.

    Args:
        hidden: Final hidden states [N, H].
        weight: The head [V, H].
        k: Tokens to keep, in [1, V].
        softcap: Final logit soft cap, or None.
        chunk_tok: Positions whose logits live at a time.

    Returns:
        ids int32, log_p float32 (float64 for float64 states).
    """
    ids, log_p = [], []
    for chunk in hidden.split(chunk_tok):
        logits = chunk.to(weight.dtype) @ weight.T
        y = capped(logits.to(wide_dtype(logits.dtype)), softcap)
        best, at = y.topk(k, dim=-1)
        lse = y.logsumexp(-1, keepdim=True)
        rest = y.scatter(-1, at, -torch.inf).logsumexp(-1, keepdim=True)
        ids.append(at.int())
        log_p.append(torch.cat([best, rest], dim=-1) - lse)
    return TopK(torch.cat(ids), torch.cat(log_p))


def topk_losses(
    ids: Tensor, log_p: Tensor, z: Tensor, s: BlockSettings, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [c], alpha [c] over the categories and argmax match [c]; `z` [c, V] is overwritten by the gradient."""
    rows = block_rows(z)
    parts = []
    for at in (slice(start, start + rows) for start in range(0, z.shape[0], rows)):
        value, alpha, match, grad = _block(ids[at].long(), log_p[at], z[at], s, backward)
        if grad is not None:
            z[at].copy_(grad)
        parts.append((value, alpha, match))
    value, alpha, match = (torch.cat(column) for column in zip(*parts))
    return value, alpha, match


def _block(
    ids: Tensor, log_p: Tensor, z_raw: Tensor, s: BlockSettings, backward: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    wide = wide_dtype(s.dtype)
    z = capped(z_raw.to(wide), s.softcaps[1])
    inside, log_p = z.gather(-1, ids), log_p.to(wide)
    whole = ids.shape[1] == z.shape[1]
    if whole:
        y_few, z_few, rest = log_p[:, :-1], inside, None
    else:
        # Not 1 - sum q: that has no digits left where the rest is small.
        rest = z.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        y_few, z_few = log_p, torch.cat([inside, rest], dim=-1)
    few = replace(s, softcaps=(None, None))
    value, alpha, _, grad_few = block(y_few, z_few, None, few, backward, best=torch.zeros_like(ids[:, 0]))
    match = argmax(z) == ids[:, 0]
    if grad_few is None:
        return value, alpha, match, None
    # d rest / d z_j = exp(z_j - rest) for the tokens of the rest.
    grad = torch.zeros_like(z) if rest is None else (z - rest).exp_().mul_(grad_few[:, -1:])
    grad.scatter_(-1, ids, grad_few[:, : ids.shape[1]])
    if s.softcaps[1] is not None:
        grad.mul_(1 - (z / s.softcaps[1]).square())
    return value, alpha, match, grad
