"""Which head rows a training step uses when the draft has a shortlist, and with which log-weights."""

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
