"""Which head rows a training step uses when the draft has a shortlist, and with which log-weights.

The exported checkpoint keeps its whole head, so the rows outside the shortlist must be trained too, at the price of a
few of them a step. Rows are the shortlist S, the step's labels L that lie outside it, and U: `num_outside` rows drawn
uniformly from the m that are left. With the shift log(m / |U|) on U's logits and 0 on S and L,

    Z^ = sum_{S, L} exp z_j + (m / |U|) sum_U exp z_j

has expectation Z for every fixed S and L. Both models get the same rows and the same shift. Then p^ and q^ are the same
estimate of p and q: their log ratio on a row is the true one up to the two partition functions, a draft equal to its
target has zero loss and zero gradient for every draw, and every loss stays finite (a target put to zero on U would
make the reverse KL infinite). L is what keeps the variance low: where the target has much mass outside the shortlist
it is nearly always on one token, the label it wrote; drawn by chance, such a row would be absent in most steps and
count m / |U| times in the others.

Measured on SmolLM2-135M's hidden states (code answers, 4,130-row shortlist with 8.5% of the target's mass outside it,
1,024 drawn rows, forward KL), error of the mean gradient over 6 draws and spread of one draw, relative to the exact
gradient of the whole head: shortlist alone .092 and 0; S+U .126 and .052; S+U with the target put to zero on U .219 and
.063; S+L+U **.017 and .035**; S+L+U with the target put to zero on U .049 and .037; S+L+U with the target's exact
partition function .023 and .046. After 120 steps on a linear draft the greedy acceptance with the whole head was .365
for the exact gradient and .356, .358, .348, **.368**, .365, .366 in that order (800 positions, one
seed: differences under .02 are chance; the gradient errors are what decided).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.losses import IGNORE, LossError

# Row counts are rounded up to this, so that products and the grouped argmax run on whole vectors.
ROW_MULTIPLE = 64


@dataclass(frozen=True)
class HeadRows:
    """Rows of a step: `ids` [R] in the vocabulary, `shift` [R] for `row_logit_shift` (None: all 0), `labels` into R."""

    ids: Tensor
    shift: Tensor | None
    labels: Tensor


def draw_rows(
    shortlist: Tensor | None,
    labels: Tensor,
    vocab_size: int,
    num_outside: int,
    generator: torch.Generator | None = None,
) -> HeadRows:
    """Shortlist rows, the step's labels outside it, and a uniform draw of the rest, each with its log-weight.

    Args:
        shortlist: Distinct token ids [n] that the engine's head keeps, or None for the whole head.
        labels: Token ids [N], `IGNORE` (-100) where a position is not supervised.
        vocab_size: Rows of the head.
        num_outside: Rows to draw from what is left, >= 0; all of it when there is less.
        generator: Source of the draw, on the CPU.

    Returns:
        The rows, with labels as indices into them.

    Raises:
        LossError: For ids outside the vocabulary or repeated, or a negative count.
    """
    if shortlist is None:
        return HeadRows(torch.arange(vocab_size, device=labels.device), None, labels)
    if num_outside < 0:
        raise LossError(f"outside rows {num_outside}: must be >= 0")
    if shortlist.numel() == 0 or shortlist.min() < 0 or shortlist.max() >= vocab_size:
        raise LossError(f"shortlist ids must be at least one and lie in [0, {vocab_size}), the rows of the head")
    index = torch.full((vocab_size,), IGNORE, dtype=torch.long)
    index[shortlist.cpu()] = 0
    if int((index == 0).sum()) != shortlist.numel():
        raise LossError("shortlist ids must be distinct")
    ids = labels.cpu()
    supervised = ids[ids != IGNORE]
    missing = supervised[index[supervised] == IGNORE].unique()
    index[missing] = 0
    rest = (index == IGNORE).nonzero().squeeze(-1)
    sure = torch.cat([shortlist.cpu(), missing])
    count = min(num_outside + -(len(sure) + num_outside) % ROW_MULTIPLE if num_outside else 0, len(rest))
    drawn = rest[torch.randperm(len(rest), generator=generator)[:count]]
    rows = torch.cat([sure, drawn])
    shift = torch.zeros(len(rows))
    if count:
        shift[len(sure) :] = torch.tensor(len(rest) / count).log()
    index[rows] = torch.arange(len(rows))
    local = torch.where(ids == IGNORE, IGNORE, index[ids.clamp(min=0)])
    return HeadRows(rows.to(labels.device), shift.to(labels.device), local.to(labels.device))
