"""How long an evaluation may take: then no new request starts, but no cell stays too thin. No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any


class Budget:
    """Decides for each request (or set of requests) whether it is still measured.

    Args:
        minutes: for all batches together; None is no limit.
        num_batches: each gets an equal part, and what the ones before it left.
        now: seconds; tests give their own.
        used_s: seconds that were used before a stop.
    """

    def __init__(
        self,
        minutes: float | None,
        num_batches: int = 1,
        now: Callable[[], float] = time.monotonic,
        used_s: float = 0.0,
    ) -> None:
        self.minutes, self.num_batches, self._now = minutes, num_batches, now
        self._start, self._opened = now() - used_s, 0
        self._taken: Counter[Hashable] = Counter()
        self.skipped: Counter[str] = Counter()

    @property
    def used_s(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    def open(self) -> None:
        """The next batch begins."""
        self._opened += 1
        self._taken.clear()

    def takes(self, domain: str, group: str, least: int) -> bool:
        """Is one more of this domain and group to be measured?

        Args:
            domain, group: of the request or set.
            least: so many are measured whatever the time.
        """
        over = self.minutes is not None and self.used_s > 60 * self.minutes * self._opened / self.num_batches
        if over and self._taken[domain, group] >= least:
            self.skipped[f"{domain}, {group}"] += 1
            return False
        self.took(domain, group)
        return True

    def took(self, domain: str, group: str) -> None:
        """One more was measured before a stop."""
        self._taken[domain, group] += 1

    def to_json(self) -> dict[str, Any]:
        """What was asked for, used and left out."""
        return {"budget_min": self.minutes, "used_min": self.used_s / 60, "skipped": dict(self.skipped)}
