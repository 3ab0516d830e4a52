"""Which head rows a draft with a shortlist reads, and how much of the target's answers they cover."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from distill.recipe import Recipe
from distill.shape import own_rows
from distill.shards import ResponseRow

log = logging.getLogger(__name__)

ENOUGH = 0.99  # of the answers' tokens


def shortlist_of(
    recipe: Recipe, target: PreTrainedConfig, rows: Sequence[ResponseRow], eos: Sequence[int]
) -> Tensor | None:
    """The head rows that the engine will use, ascending [S], or None for all.

    A draft that is tuned keeps the rows that it was trained with: others would be rows that its head hardly knows.

    Args:
        recipe: its draft's head.
        target: the target's config.
        rows: training answers.
        eos: ids that end an answer.

    Raises:
        BrokenDraft: the draft that is tuned has a draft.json that can not be read.
    """
    size, own = recipe.draft.head.size, own_rows(recipe.draft)
    if own is not None and size == len(own):
        log.info("shortlist: the %d rows that %s was trained with", size, recipe.draft.model)
        return own
    return None if size is None else torch.tensor(sorted(by_use(rows, target.vocab_size, eos)[:size]))


def by_use(rows: Sequence[ResponseRow], vocab_size: int, always: Sequence[int]) -> list[int]:
    """All ids, those first that the target writes most often in its answers.

    Args:
        rows: training answers.
        vocab_size: rows of the head; the prompts' ids follow those of the answers, then the lowest ones (byte-pair
            merges are numbered by frequency).
        always: ids that come first whatever their count (end of text).
    """
    answers = Counter(token for row in rows for token in row.answer_ids)
    prompts = Counter(token for row in rows for token in row.prompt_ids)
    order = dict.fromkeys(always)
    for counts in (answers, prompts):
        order |= dict.fromkeys(sorted(counts, key=lambda token: (-counts[token], token)))
    return list(order | dict.fromkeys(range(vocab_size)))


def coverage(rows: Sequence[ResponseRow], shortlist: Sequence[int]) -> dict[str, float]:
    """Share of the answers' tokens that are in the shortlist, by domain."""
    kept = set(shortlist)
    domains: dict[str, list[bool]] = {}
    for row in rows:
        domains.setdefault(row.domain, []).extend(token in kept for token in row.answer_ids)
    return {domain: statistics.fmean(inside) for domain, inside in sorted(domains.items()) if inside}


def size_for(order: Sequence[int], rows: Sequence[ResponseRow], share: float) -> int:
    """How many of the first ids of `order` cover so much of the answers' tokens."""
    place = {token: at for at, token in enumerate(order)}
    places = sorted(place[token] for row in rows for token in row.answer_ids)
    return places[math.ceil(share * len(places)) - 1] + 1


def coverage_line(order: Sequence[int], shortlist: Tensor, held_out: Sequence[ResponseRow]) -> str:
    """What the shortlist covers by domain, and where that is less than `ENOUGH`, how many rows would cover so much.

    It does not say what acceptance that costs: the tokens left out are rare ones, which a draft seldom gets right.
    Validation measures it (alpha beside that of the whole head).

    Args:
        order: all ids, of `by_use`.
        shortlist: of `shortlist_of`.
        held_out: answers of any domain, none of them trained on.
    """
    told = []
    for domain, share in coverage(held_out, shortlist.tolist()).items():
        needed = size_for(order, [row for row in held_out if row.domain == domain], ENOUGH)
        told.append(f"{domain} {share:.2%}" + (f" ({ENOUGH:.0%} takes {needed} rows)" if share < ENOUGH else ""))
    return f"shortlist: {len(shortlist)} of {len(order)} head rows; covers held-out answers: {', '.join(told)}"
