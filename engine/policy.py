"""How many tokens to draft next: fixed, by a table, or from past cycles. Never from a drafted token's own probability.

A policy may look at whole past cycles only. Dropping a token after looking at its probability would change what is
sampled (a known-wrong variant in the tests); choosing the next k by how earlier cycles went does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.cycle import MAX_K, Costs, cycle_ms

# Judged proposals, at each place, that the prior is worth.
PRIOR_WORTH = 6.0
# Timed cycles that the measured costs are worth, and cycles after which a timed one has lost all but 1/e of its weight.
COSTS_WORTH, TIMES_MEMORY = 4.0, 64.0
# A cycle that took less or more than so many times what it should (a graph's capture, a paused machine) counts as that.
ODD = (0.5, 2.0)
# Times count when no request is under way, and where that never is after so many cycles.
MOST_HEARD = 256


class Policy(Protocol):
    """Chooses k for the next cycle of a batch; the decoder caps it by its own k and by what rows can use."""

    def choose(self, requests: Sequence[str], context: int) -> int:
        """k for rows of these requests whose longest holds `context` tokens."""
        ...

    def drafts(self, request: str, context: int) -> bool:
        """Is anything expected to be drafted for a request of so many tokens? If not, no draft need read it yet."""
        ...

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        """One row's cycle is over."""
        ...

    def took(self, k: int, rows: int, context: int, ms: float) -> None:
        """A cycle of k proposals in so many rows, the longest of so many tokens, took so many milliseconds."""
        ...

    def forget(self, request: str) -> None:
        """The request is finished."""
        ...


@dataclass(frozen=True)
class Schedule:
    """k by kind of request and load: the first entry that holds all rows of a batch decides.

    Attributes:
        table: {(kind, largest context in tokens, most rows): k}, in the order in which it is tried; "" holds any kind.
            Beyond all of it, k is 0.
        kinds: of requests by id; one that is not there is held by "" alone.

    Raises:
        ValueError: an empty table, or a k out of 0..16.
    """

    table: Mapping[tuple[str, int, int], int]
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.table or not all(0 <= k <= MAX_K for k in self.table.values()):
            raise ValueError(f"schedule {dict(self.table)}: it needs an entry, and every k must be 0 to {MAX_K}")

    def choose(self, requests: Sequence[str], context: int) -> int:
        kinds = {self.kinds.get(request, "") for request in requests}
        for (kind, limit, rows), k in self.table.items():
            if context <= limit and len(requests) <= rows and (not kind or kinds == {kind}):
                return k
        return 0

    def drafts(self, request: str, context: int) -> bool:
        return self.choose([request], context) > 0

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        """A table learns nothing."""

    def took(self, k: int, rows: int, context: int, ms: float) -> None:
        """A table times nothing."""

    def forget(self, request: str) -> None:
        """A table keeps nothing."""


class Adaptive:
    """The k with the most expected tokens a millisecond, at measured costs and the acceptance of past cycles.

    A cycle that accepts a of k proposals has judged min(a + 1, k) of them. For each place in the block the acceptance
    is the kept part of the proposals judged there, given that those before were kept; older cycles weigh less, and a
    request is drawn towards the mean of all requests of its kind while it has few of its own. One figure for all places
    would be too low for the later ones: where the first token was right, so is more often the second.

    Where even the best k is slower than none by more than `margin`, drafting stops; a probe looks again after
    `probe_after` cycles, then after twice as many, and so on up to 16 times; one that is wholly accepted is followed by
    another. The margin is there because an estimate that fell by chance can not recover while nothing is drafted: on
    recorded answers it lost up to 4% to the best fixed k without, and at most 1.2% with it.

    Costs that are a few percent off decide wrongly between two k, so they are corrected by what cycles of each k take:
    with costs up to 8% off the best fixed k of a domain was missed by up to 5.7% on recorded answers, by 2.0% when
    corrected. A correction fades, also of a k that is not used: a slow spell of the machine must not decide for long.
    Times count once no request is under way (or after 256 cycles): up to then the choices depend on the texts alone.

    Args:
        costs: measured at one or more contexts, for the batch that is served; the nearest context counts.
        most: largest k.
        memory: cycles after which a cycle's weight has fallen to 1/e; ten times as many for the mean of all.
        strength: judged proposals, at each place, that the mean of all requests is worth.
        probe_after: cycles without drafting before the first probe.
        prior: acceptance before anything is seen.
        margin: expected loss, as a part of the speed without drafting, up to which drafting goes on.
        kinds: of requests by id (their domains, say); each kind has a mean and probes of its own. One that is not there
            is of the kind "".

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
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        if not costs or not 1 <= most <= min(c.ks[-1] for c in costs):
            known = [c.ks[-1] for c in costs]
            raise ValueError(f"adaptive policy: most is {most}; it must be 1 to the largest measured k, of {known}")
        self.costs, self.most, self.strength = list(costs), most, strength
        self.probe_after, self.margin = probe_after, margin
        self._fade = 1 - 1 / memory
        # (kept, judged) by place in the block.
        self._seen: dict[str, list[tuple[float, float]]] = {}
        self._kinds = {} if kinds is None else kinds
        self._prior = [(prior * PRIOR_WORTH, PRIOR_WORTH)] * most
        self._all: dict[str, list[tuple[float, float]]] = {}
        # Cycles without drafting and probes that failed, by the kinds of a batch; and those of the newest one.
        self._rests: dict[frozenset[str], list[int]] = {}
        self._rest = [0, 0]
        # Sum and weight of (time / expected time) by k; what was heard since; requests and k of the newest cycle.
        self._times: dict[int, tuple[float, float]] = {}
        self._heard: list[tuple[int, float]] = []
        self._under_way: set[str] = set()
        self._newest = 0

    def acceptance(self, request: str) -> list[float]:
        """The estimate for one request, by place in the block, each given that those before were accepted."""
        own = self._seen.get(request, [(0.0, 0.0)] * self.most)
        means = [kept / judged for kept, judged in self._all.get(self._kind(request), self._prior)]
        return [(k + self.strength * mean) / (n + self.strength) for (k, n), mean in zip(own, means, strict=True)]

    def _kind(self, request: str) -> str:
        return self._kinds.get(request, "")

    def expected_ms(self, k: int, context: int, corrected: bool = True) -> float:
        """What a cycle of k proposals takes: as measured before, and corrected by cycles since."""
        costs = min(self.costs, key=lambda c: abs(c.context - context))
        ms = cycle_ms(costs, k) if k else costs.T_ms
        return ms * self._correction(k) if corrected else ms

    def _correction(self, k: int) -> float:
        """A k that was seldom timed is taken to be off as far as all are."""
        total, weight = (sum(column) for column in zip((0.0, 0.0), *self._times.values(), strict=True))
        every = (COSTS_WORTH + total) / (COSTS_WORTH + weight)
        mine, num = self._times.get(k, (0.0, 0.0))
        return (COSTS_WORTH * every + mine) / (COSTS_WORTH + num)

    def _rates(self, requests: Sequence[str], context: int) -> list[float]:
        """Expected tokens a millisecond of all rows, by k."""
        # Each further place adds the chance that the block is kept so far.
        tokens = [float(len(requests))] + [0.0] * self.most
        for request in requests:
            kept = 1.0
            for place, accept in enumerate(self.acceptance(request), 1):
                kept *= accept
                tokens[place] += kept
        total, rates = 0.0, []
        for k, more in enumerate(tokens):
            total += more
            rates.append(total / self.expected_ms(k, context))
        return rates

    def _pays(self, rates: Sequence[float]) -> bool:
        return max(rates[1:]) > rates[0] * (1 - self.margin)

    def drafts(self, request: str, context: int) -> bool:
        return self._pays(self._rates([request], context))

    def choose(self, requests: Sequence[str], context: int) -> int:
        self._under_way = set(requests)
        rates = self._rates(requests, context)
        best = max(range(1, self.most + 1), key=rates.__getitem__)
        self._rest = rest = self._rests.setdefault(frozenset(map(self._kind, requests)), [0, 0])
        if self._pays(rates):
            rest[:] = 0, 0
            return best
        idle, failed = rest
        if idle < self.probe_after * 2 ** min(failed, 4):
            rest[0] += 1
            return 0
        rest[:] = 0, failed + 1
        return best

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        if not proposed:
            return
        if accepted == proposed:  # a probe that went well is followed by another at once
            self._rest[:] = self.probe_after, 0
        judged = min(accepted + 1, proposed)
        own = self._seen.setdefault(request, [(0.0, 0.0)] * self.most)
        mean = self._all.setdefault(self._kind(request), list(self._prior))
        # The mean of a kind fades ten times slower.
        for table, fade in ((own, self._fade), (mean, 1 - (1 - self._fade) / 10)):
            for place in range(judged):
                kept, before = table[place]
                table[place] = kept * fade + (place < accepted), before * fade + 1

    def took(self, k: int, rows: int, context: int, ms: float) -> None:
        resumed, self._newest = k > 0 and self._newest == 0, k
        # Other rows have other costs; and a draft that catches up with what it did not see has no usual cycle.
        if rows == self.costs[0].batch and not resumed:
            self._heard.append((k, ms / self.expected_ms(k, context, corrected=False)))

    def forget(self, request: str) -> None:
        self._seen.pop(request, None)
        self._under_way.discard(request)
        if self._under_way and len(self._heard) < MOST_HEARD:
            return
        fade = 1 - 1 / TIMES_MEMORY
        for k, ratio in self._heard:
            known = self._correction(k)
            # All fade, those of other k too: what a slow spell said of a k must not outlive it.
            self._times = {j: (total * fade, weight * fade) for j, (total, weight) in self._times.items()}
            total, weight = self._times.get(k, (0.0, 0.0))
            self._times[k] = total + min(max(ratio, ODD[0] * known), ODD[1] * known), weight + 1
        self._heard.clear()

    def state(self) -> dict[str, Any]:
        """What was learnt of all requests, by kind, JSON-ready; taken while none is running."""
        return {
            "means": {kind: [list(pair) for pair in mean] for kind, mean in self._all.items()},
            "rests": [[sorted(kinds), *rest] for kinds, rest in self._rests.items()],
            "times": [[k, *pair] for k, pair in self._times.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`.

        Raises:
            ValueError: of a policy with another largest k, or no state.
        """
        try:
            means = {kind: [(float(kept), float(judged)) for kept, judged in mean]
                     for kind, mean in state["means"].items()}  # fmt: skip
            rests = {frozenset(map(str, kinds)): [int(idle), int(failed)] for kinds, idle, failed in state["rests"]}
            times = {int(k): (float(total), float(weight)) for k, total, weight in state.get("times", [])}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"adaptive policy: {dict(state)!r:.100} is no state of one") from error
        pairs = [pair for mean in means.values() for pair in mean]
        if any(len(mean) != self.most for mean in means.values()) or not all(0 <= k <= n and n > 0 for k, n in pairs):
            raise ValueError(f"adaptive policy: state {means!r:.100} is not of one with k up to {self.most}")
        if not all(0 <= k <= self.most and n > 0 and 0 < total < n * 1e6 for k, (total, n) in times.items()):
            raise ValueError(f"adaptive policy: times {times!r:.100} are not of one with k up to {self.most}")
        self._all, self._rests, self._times = means, rests, times
