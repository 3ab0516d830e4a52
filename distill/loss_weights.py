"""Which supervised positions count, and how much: survival of the drafted prefix, and selection by reference gap."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def survival_weights(accept: Tensor, place: Tensor, k: int) -> Tensor:
    """How often a draft of k tokens gets as far as each position, where a cycle may begin at any of them.

    A token that stands behind a rejected one is thrown away unread, so its loss matters less:
        w_t = 1/m sum_{j=0}^{m-1} prod_{i=1}^{j} a_{t-i},  m = min(k, place_t + 1)
    is the chance that the j tokens before t were accepted, averaged over its places j in a block that begins inside the
    answer. w_t lies in [1/k, 1]; k = 1 gives 1 everywhere.

    Args:
        accept: Acceptance a_t of each position, in [0, 1], answers one after the other [N].
        place: Index of the position in its answer [N].
        k: Tokens drafted a cycle, >= 1.

    Returns:
        Weights [N] in the dtype of `accept`.

    Source:
        Own; the product is P(prefix survives) of arXiv 2211.17192 section 3.1 with its own a for each position.
    """
    run, total = torch.ones_like(accept), torch.ones_like(accept)
    for j in range(1, k):
        before = torch.zeros_like(accept)
        before[j:] = accept[:-j]
        run = run * before * (place >= j)
        total = total + run
    return total / (place + 1).clamp(max=k)


def num_selected(num: int, frac: float) -> int:
    """Positions that `select` keeps of `num`: ceil(frac * num), so that a batch never keeps none."""
    return math.ceil(frac * num)


def select(loss: Tensor, reference: Tensor, frac: float) -> Tensor:
    """The positions at which the draft has most to gain: those with the largest loss - reference loss.

    A reference of the draft's own size that is already distilled tells which tokens such a model can learn: where its
    loss is as high as the draft's, the token is beyond both, and is left out.

    Args:
        loss: The draft's loss at each position [N].
        reference: The reference's [N].
        frac: Share of the positions to keep, in (0, 1].

    Returns:
        Indices [num_selected] in ascending order; of equal gaps the earlier positions are kept.

    Source:
        arXiv 2510.19779 (AdaSPEC), its token filter: top k% of delta L = L_draft - L_ref in a batch.
    """
    order = (loss - reference).argsort(descending=True, stable=True)
    return order[: num_selected(len(loss), frac)].sort().values
