"""Clipping and clearing the gradients of a step; of a large table only the rows that have one are read.

A step gives a gradient to some 8,700 of 49,152 rows. Norm, scaling and clearing of all of them took an eighth of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from distill.words import Words

Touched = Mapping[nn.Parameter, Tensor]


def touched_rows(table: nn.Parameter, ids: Tensor, embedding: nn.Module, words: Words | None) -> Touched:
    """Rows with a gradient, distinct: of the head's table those of the step, of the embedding those that it read.

    Args:
        table: of the head; with a tied head the embedding's.
        ids: its rows in this step.
        embedding: its weight may be the table.
        words: what the step read of it; None where it is not trained.
    """
    if words is None:
        return {table: ids}
    assert isinstance(embedding.weight, nn.Parameter)
    if embedding.weight is table:
        return {table: torch.cat([ids, words.ids]).unique()}
    return {table: ids, embedding.weight: words.ids}


def clip(parameters: Iterable[nn.Parameter], limit: float, touched: Touched) -> Tensor:
    """Scales gradients so that their common norm is at most `limit`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: those without a gradient are left out.
        limit: of the norm; inf scales nothing.
        touched: of some tables the distinct rows that may have a gradient; all their other rows have 0.

    Returns:
        The norm before scaling (of a sharded model a DTensor).
    """
    trained = [p for p in parameters if p.grad is not None]
    dense = [p for p in trained if p not in touched]
    parts = {p: p.grad[touched[p]] for p in trained if p in touched and p.grad is not None}
    norm = nn.utils.get_total_norm([*(p.grad for p in dense if p.grad is not None), *parts.values()])
    nn.utils.clip_grads_with_norm_(dense, limit, norm)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p, part in parts.items():
        assert p.grad is not None
        p.grad.index_copy_(0, touched[p], part.mul_(factor))
    return norm


@torch.no_grad()
def clear(parameters: Iterable[nn.Parameter], touched: Touched) -> None:
    """Sets gradients to 0 in place: a table's worth of fresh memory at every step would take longer."""
    for p in parameters:
        if p.grad is not None and p in touched:
            p.grad.index_fill_(0, touched[p], 0.0)
        elif p.grad is not None:
            p.grad.zero_()
