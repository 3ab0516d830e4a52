"""Arms that are clearly behind after a sixth, or a third, of the requests are not measured any further. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, stdev
from typing import Any

from eval.records import BASELINE, RequestRow

# An arm is behind in a cell when it is slower than the best arm there by more than this, and by this many standard
# errors of the paired difference; by more of them where there are few differences to know the error from.
BEHIND_FRAC = 0.03
ERRORS, FEW = 2.5, 2.7
# Requests that both must have answered in a cell.
LEAST = 5
# Of all requests; of a small cell that is more. The choice leaves out what was dropped, so that others keep all theirs.
LOOKS = (1 / 6, 1 / 3)


class Race:
    """Takes rows as they come and says which arms go on.

    An arm leaves only when it is behind the best arm of every domain and group: what is bad on average may be the best
    for one of them. The baseline never leaves, nor does the best arm of each draft: the verdict is about a draft.

    Args:
        num_requests: of the whole evaluation, warm-up left out.
    """

    def __init__(self, num_requests: int) -> None:
        self.looks = sorted({math.ceil(num_requests * part) for part in LOOKS})
        self.looked = 0
        self.dropped: dict[str, float] = {}
        self._pace: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        self._requests: set[str] = set()
        self._draft: dict[str, str] = {}

    def add(self, row: RequestRow) -> None:
        """One more row."""
        if row.warmup or row.error is not None or row.clock != "bare" or row.repeat:
            return
        self._requests.add(row.request_id)
        self._draft[row.arm] = row.draft
        self._pace[row.domain, row.group][row.arm][row.request_id] = math.log(row.e2e_ms / row.new_tok)

    def keeps(self, arm: str) -> bool:
        """Does the arm go on? Asked before a request, when all rows of those before are in."""
        while self.looked < len(self.looks) and len(self._requests) >= self.looks[self.looked]:
            self.looked += 1
            self.dropped |= self._behind()
        return arm not in self.dropped

    def to_json(self) -> dict[str, Any]:
        """After how many requests arms were dropped, and how far behind the best each was where it was least behind."""
        return {"after_requests": self.looks[: self.looked], "dropped": self.dropped}

    def _behind(self) -> dict[str, float]:
        """By how much each arm that is behind everywhere is slower at least."""
        # Those that are gone answered other requests than those that are left.
        left = [{arm: p for arm, p in c.items() if arm not in self.dropped} for c in self._pace.values()]
        cells = [c for c in left if len(c.get(BASELINE, {})) >= LEAST]
        arms = {arm for cell in cells for arm in cell} - {BASELINE}
        for draft in {self._draft[arm] for arm in arms}:
            own = [arm for arm in arms if self._draft[arm] == draft]
            arms.discard(min(own, key=lambda arm: fmean(p for c in cells for p in c.get(arm, {}).values())))
        lags = {arm: [_lag(cell, arm) for cell in cells] for arm in arms}
        return {arm: min(found) for arm, found in sorted(lags.items()) if found and min(found) > 0}


def _lag(cell: dict[str, dict[str, float]], arm: str) -> float:
    """By how much the arm is slower than the best one of the cell; 0 where that is not clear."""
    best = min(cell, key=lambda name: fmean(cell[name].values()))
    apart = [cell[arm][r] - cell[best][r] for r in _both(cell.get(arm, {}), cell[best])]
    if best == arm or len(apart) < LEAST:
        return 0.0
    mean, error = fmean(apart), stdev(apart) / math.sqrt(len(apart))
    return math.exp(mean) - 1 if mean > max(math.log1p(BEHIND_FRAC), errors_of(len(apart)) * error) else 0.0


def errors_of(num: int) -> float:
    """Standard errors that `num` paired differences must lie apart by: about as unlikely by chance for any number.

    ERRORS (1 + FEW / (num - 1)): 4.2 for 5, by Student's t 0.5 to 0.7% of one side for 5 to 60.
    """
    return ERRORS * (1 + FEW / (num - 1))


def _both(one: Iterable[str], other: Iterable[str]) -> list[str]:
    there = set(other)
    return [name for name in one if name in there]
