"""How many tokens to draft next: fixed, by a table, or from past cycles. Never from a drafted token's own probability.

A policy may look at whole past cycles only. Dropping a token after looking at its probability would change what is
sampled (a known-wrong variant in the tests); choosing the next k by how earlier cycles went does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.cycle import MAX_K, Costs, cycle_ms

# Judged proposals, at each place, that the prior is worth.
PRIOR_WORTH = 6.0


class Policy(Protocol):
    """Chooses k for the next cycle of a batch; the decoder caps it by its own k and by what rows can use."""

    def choose(self, requests: Sequence[str], context: int) -> int:
        """k for rows of these requests whose longest holds `context` tokens."""
        ...

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        """One row's cycle is over."""
        ...

    def forget(self, request: str) -> None:
        """The request is finished."""
        ...


@dataclass(frozen=True)
class Schedule:
    """k by load: the first entry (largest context, largest batch) that holds the load decides.

    Attributes:
        table: {(context tokens, rows): k}, in the order in which it is tried; beyond all of it, k is 0.

    Raises:
        ValueError: an empty table, or a k out of 0..16.
    """

    table: Mapping[tuple[int, int], int]

    def __post_init__(self) -> None:
        if not self.table or not all(0 <= k <= MAX_K for k in self.table.values()):
            raise ValueError(f"schedule {dict(self.table)}: it needs an entry, and every k must be 0 to {MAX_K}")

    def choose(self, requests: Sequence[str], context: int) -> int:
        fits = (k for (limit, rows), k in self.table.items() if context <= limit and len(requests) <= rows)
        return next(fits, 0)

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        """A table learns nothing."""

    def forget(self, request: str) -> None:
        """A table keeps nothing."""


class Adaptive:
    """The k with the most expected tokens a millisecond, at measured costs and the acceptance of past cycles.

    A cycle that accepts a of k proposals has judged min(a + 1, k) of them. For each place in the block the acceptance
    is the kept part of the proposals judged there, given that those before were kept; older cycles weigh less, and a
    request is drawn towards the mean of all requests while it has few of its own. One figure for all places would be
    too low for the later ones: where the first token was right, so is more often the second.

    Where even the best k is slower than none by more than `margin`, drafting stops; a probe looks again after
    `probe_after` cycles, then after twice as many, and so on up to 16 times; one that is wholly accepted is followed by
    another. The margin is there because an estimate that fell by chance can not recover while nothing is drafted: on
    recorded answers it lost up to 4% to the best fixed k without, and at most 1.2% with it.

    Args:
        costs: measured at one or more contexts, for the batch that is served; the nearest context counts.
        most: largest k.
        memory: cycles after which a cycle's weight has fallen to 1/e; ten times as many for the mean of all.
        strength: judged proposals, at each place, that the mean of all requests is worth.
        probe_after: cycles without drafting before the first probe.
        prior: acceptance before anything is seen.
        margin: expected loss, as a part of the speed without drafting, up to which drafting goes on.

    Raises:
        ValueError: no costs, or a `most` beyond what they were measured for.
    """

    def __init__(
        self,
        costs: Sequence[Costs],
        most: int,
        memory: float = 16.0,
        strength: float = 12.0,
        probe_after: int = 8,
        prior: float = 0.6,
        margin: float = 0.04,
    ) -> None:
        if not costs or not 1 <= most <= min(c.ks[-1] for c in costs):
            known = [c.ks[-1] for c in costs]
            raise ValueError(f"adaptive policy: most is {most}; it must be 1 to the largest measured k, of {known}")
        self.costs, self.most, self.strength = list(costs), most, strength
        self.probe_after, self.margin = probe_after, margin
        self._fade = 1 - 1 / memory
        # (kept, judged) by place in the block.
        self._seen: dict[str, list[tuple[float, float]]] = {}
        self._all = [(prior * PRIOR_WORTH, PRIOR_WORTH)] * most
        self._idle = self._failed = 0

    def acceptance(self, request: str) -> list[float]:
        """The estimate for one request, by place in the block, each given that those before were accepted."""
        own = self._seen.get(request, [(0.0, 0.0)] * self.most)
        means = [kept / judged for kept, judged in self._all]
        return [(k + self.strength * mean) / (n + self.strength) for (k, n), mean in zip(own, means, strict=True)]

    def choose(self, requests: Sequence[str], context: int) -> int:
        costs = min(self.costs, key=lambda c: abs(c.context - context))
        # Expected tokens of all rows by k: each further place adds the chance that the block is kept so far.
        tokens = [float(len(requests))] + [0.0] * self.most
        for request in requests:
            kept = 1.0
            for place, accept in enumerate(self.acceptance(request), 1):
                kept *= accept
                tokens[place] += kept
        total, rates = 0.0, []
        for k, more in enumerate(tokens):
            total += more
            rates.append(total / (cycle_ms(costs, k) if k else costs.T_ms))
        best = max(range(1, self.most + 1), key=rates.__getitem__)
        if rates[best] > rates[0] * (1 - self.margin):
            self._idle = self._failed = 0
            return best
        self._idle += 1
        if self._idle <= self.probe_after * 2 ** min(self._failed, 4):
            return 0
        self._idle, self._failed = 0, self._failed + 1
        return best

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        if not proposed:
            return
        if accepted == proposed:  # a probe that went well is followed by another at once
            self._idle, self._failed = self.probe_after, 0
        judged = min(accepted + 1, proposed)
        own = self._seen.setdefault(request, [(0.0, 0.0)] * self.most)
        # The mean of all fades ten times slower.
        for table, fade in ((own, self._fade), (self._all, 1 - (1 - self._fade) / 10)):
            for place in range(judged):
                kept, before = table[place]
                table[place] = kept * fade + (place < accepted), before * fade + 1

    def forget(self, request: str) -> None:
        self._seen.pop(request, None)

    def state(self) -> dict[str, Any]:
        """What was learnt of all requests, JSON-ready; taken while none is running."""
        return {"all": [list(pair) for pair in self._all], "idle": self._idle, "failed": self._failed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`.

        Raises:
            ValueError: of a policy with another largest k, or no state.
        """
        try:
            means = [(float(kept), float(judged)) for kept, judged in state["all"]]
            idle, failed = int(state["idle"]), int(state["failed"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"adaptive policy: {dict(state)!r:.100} is no state of one") from error
        if len(means) != self.most or not all(0 <= kept <= judged and judged > 0 for kept, judged in means):
            raise ValueError(f"adaptive policy: state {means!r:.100} is not of one with k up to {self.most}")
        self._all, self._idle, self._failed = means, idle, failed
