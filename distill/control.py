"""A race's control: a draft so small that it should lose. Does size buy anything here, or chance? No torch.

A control reads (or stores, by its own count) no more than 2% of the target. Winner and control are predicted on the
same held-out answers; the interval of their ratio resamples these answers whole, the same ones for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.tau import Cycles, count_cycles
from engine.costs import Costs, predicted_speedup

CONTROL = (0.01, 0.02)  # of the target, as eval.plan --race makes one
FEW = 8  # answers under which no interval is given
RESAMPLES = 1000


@dataclass(frozen=True)
class Judged:
    """What a candidate would have done on the held-out answers, answer by answer.

    Attributes:
        costs, prefill_ms, draft_prefill_ms, new_tok: what its speedup is predicted with.
        k: its draft length.
        domains: by domain, for each answer [cycles, of them accepted at least 1, ... k].
    """

    costs: Costs
    prefill_ms: float
    draft_prefill_ms: float
    new_tok: int
    k: int
    domains: Mapping[str, Sequence[Sequence[float]]]

    def speedup(self, picked: Mapping[str, Sequence[int]]) -> float | None:
        """Mean over the domains of the predicted speedup on some of their answers; None without a whole cycle."""
        found = []
        for domain, rows in picked.items():
            num, *reached = np.asarray(self.domains[domain], float)[list(rows)].sum(0).tolist()
            if not num:
                return None
            accept = Cycles(self.k, num, tuple(reached)).conditional
            prefills = self.prefill_ms, self.draft_prefill_ms
            found.append(predicted_speedup(self.costs, self.k, accept, *prefills, self.new_tok))
        return statistics.fmean(found)


def by_answer(texts: Sequence[Sequence[float]], k: int) -> list[list[float]]:
    """[cycles, accepted at least 1, ... k] of each text; see `distill.tau.count_cycles`."""
    counted = [count_cycles([text], k) for text in texts]
    return [[one.num, *one.reached] for one in counted]


def no_control(fracs: Sequence[float]) -> str | None:
    """What to say of a race in which nothing is small; None where there is a control.

    Args:
        fracs: of the target, each candidate by its own size_count.
    """
    if min(fracs) <= CONTROL[1]:
        return None
    return (
        f"no control: the smallest candidate has {min(fracs):.1%} of the target, so nothing tells whether size buys "
        f"anything here; python -m eval.plan RECIPE --race FILE adds one of {CONTROL[0]:.0%} to {CONTROL[1]:.0%}"
    )


def ratio_interval(above: Judged, below: Judged, seed: int) -> tuple[float, float] | None:
    """95% interval of the ratio of two predicted speedups, over the same answers; None for fewer than 8.

    Args:
        above, below: of the same held-out answers.
        seed: of the resamples.

    Source: percentile bootstrap, Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    sizes = {domain: len(rows) for domain, rows in above.domains.items()}
    assert sizes == {domain: len(rows) for domain, rows in below.domains.items()}
    if sum(sizes.values()) < FEW:
        return None
    generator = np.random.default_rng(seed)
    ratios = []
    for _ in range(RESAMPLES):
        picked = {domain: generator.integers(0, num, num).tolist() for domain, num in sizes.items()}
        first, second = above.speedup(picked), below.speedup(picked)
        if first is not None and second is not None:
            ratios.append(first / second)
    if not ratios:
        return None
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def mark(
    ranked: Sequence[dict[str, Any]], fracs: Sequence[float], judged: Callable[[int], Judged], seed: int
) -> Iterator[tuple[bool, str]]:
    """Marks the controls in a race's table, with the interval of the winner's speedup over theirs.

    Args:
        ranked: rows, the winner's first; each gets `control` and, of a control that lost, `winner_over`.
        fracs: of each candidate, see `no_control`.
        judged: by candidate.
        seed: of the intervals.

    Yields:
        For each control: did size buy something, beyond chance; and what it tells, in a sentence.
    """
    winner = ranked[0]
    for row in ranked:
        row["control"], row["winner_over"] = fracs[row["candidate"]] <= CONTROL[1], None
        if row["control"]:
            if row is not winner:
                row["winner_over"] = ratio_interval(judged(winner["candidate"]), judged(row["candidate"]), seed)
            yield (row["winner_over"] or (0.0,))[0] > 1, beside(winner, row, row["winner_over"])


def beside(winner: Mapping[str, Any], control: Mapping[str, Any], interval: tuple[float, float] | None) -> str:
    """What the control tells, in a sentence.

    Args:
        winner, control: their rows of the race's table.
        interval: of the winner's speedup over the control's.
    """
    if winner["candidate"] == control["candidate"]:
        return (
            f"the control won: {control['draft']} ({control['speedup']:.3f}x). After so few steps size bought nothing; "
            "a longer race, or more answers, may tell otherwise"
        )
    ratio = f"{winner['speedup'] / control['speedup']:.3f}x the control's speedup ({control['draft']})"
    if interval is None:
        return f"the winner has {ratio}; under {FEW} held-out answers, so whether that is chance is not known"
    over = f"{ratio}, 95% interval {interval[0]:.3f} to {interval[1]:.3f}"
    if interval[0] <= 1:
        return f"the control came within chance of the winner, which has {over}: no size is shown to buy anything here"
    return f"size bought something: the winner has {over}"
