"""One request to its end, or a set through a few rows (continuous batching), with the times that each request saw."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.clock import Clock
from engine.request import Answer, Request
from engine.speculate import Decoder
from eval.prefix import Prefixes
from eval.records import PHASES


@dataclass
class Served:
    """A request and its times in milliseconds, as `RequestRow` has them.

    Attributes:
        answer: its tokens and cycles.
        start_s: when it was admitted.
        prefill_ms, draft_prefill_ms: its own.
        wall_ms: from the end of its own prefill to its end, less `stall_ms`.
        stall_ms: prefills of others while it was there.
        phases_ms: of its cycles; what the loop itself takes is in none of them.
        since_ms: when decoding began, by the clock.
        full_tok, full_ms: tokens that cycles emitted while no row was empty; its share of the time of those cycles.
    """

    answer: Answer
    start_s: float
    prefill_ms: float
    draft_prefill_ms: float
    since_ms: float
    wall_ms: float = 0.0
    stall_ms: float = 0.0
    phases_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    full_tok: int = 0
    full_ms: float = 0.0

    @property
    def steady_tok(self) -> int:
        """Tokens of the steady state; the prefill's is one when any other is."""
        return self.full_tok + 1 if self.full_tok else 0

    @property
    def steady_ms(self) -> float:
        """Its share of the steady state's time; a prefill counts as far as the answer lies in it."""
        part = self.steady_tok / len(self.answer.tokens)
        return self.full_ms + part * (self.prefill_ms + self.draft_prefill_ms)


@dataclass
class _Timeline:
    """The clock, and ahead of it what prompts took that were not read now but copied."""

    clock: Clock
    ahead_ms: float = 0.0

    def now_ms(self) -> float:
        return self.clock.now_ms() + self.ahead_ms


def serve(
    decoder: Decoder,
    requests: Sequence[Request],
    rows: int,
    clock: Clock,
    prefixes: Prefixes | None = None,
    keep: bool = True,
) -> list[Served]:
    """Answers a set of requests; a waiting one takes each row that becomes free.

    Args:
        decoder: with no active request; its clock is `clock`.
        requests: in the order in which they are admitted; more than `rows`, else there is no steady state to speak of.
        rows: requests at once, no more than the slabs have.
        clock: its phases are read after every cycle.
        prefixes: prompts that were read before; they are copied, and their time is charged all the same.
        keep: keep those that are read here.

    Returns:
        the requests in the order they finished.
    """
    waiting, live, done = deque(requests), list[Served](), list[Served]()
    prefixes, timeline = prefixes or Prefixes(), _Timeline(clock)
    clock.totals_ms()
    decoder.clear(max((len(r.ids) + r.max_new for r in requests), default=0) + decoder.k)
    while waiting or live:
        while waiting and len(live) < rows:
            new = _admit(decoder, waiting.popleft(), timeline, prefixes, keep)
            for other in live:
                other.stall_ms += new.prefill_ms + new.draft_prefill_ms
            live.append(new)
            decoder.retire()  # an answer of one token
            live, done = _part(live, done)
        if live:
            _cycle(decoder, live, len(live) == rows, timeline)
            live, done = _part(live, done)
    return done


def _part(live: list[Served], done: list[Served]) -> tuple[list[Served], list[Served]]:
    """Moves finished requests over."""
    return [s for s in live if not s.answer.finish], done + [s for s in live if s.answer.finish]


def _admit(decoder: Decoder, request: Request, timeline: _Timeline, prefixes: Prefixes, keep: bool) -> Served:
    row, clock = len(decoder.active), timeline.clock
    start_s, start = time.perf_counter() + timeline.ahead_ms / 1e3, clock.now_ms()
    hidden, read_ms = prefixes.read(decoder.target, request.ids, row, clock, keep)
    draft_ms, drafted = 0.0, decoder.reads_draft(request)
    if drafted:
        assert decoder.drafter is not None
        draft_ms = prefixes.start(decoder.drafter, request.ids, row, clock, keep)
    before = clock.now_ms()
    answer = decoder.resume(request, hidden, drafted)
    end = clock.now_ms()
    prefill_ms = read_ms + end - before
    timeline.ahead_ms += prefill_ms + draft_ms - (end - start)
    return Served(answer, start_s, prefill_ms, draft_ms, timeline.now_ms())


def _cycle(decoder: Decoder, live: Sequence[Served], full: bool, timeline: _Timeline) -> None:
    """One cycle, charged to all requests in it."""
    before = [len(s.answer.tokens) for s in live]
    start = timeline.now_ms()
    decoder.cycle()
    now = timeline.now_ms()
    spent = now - start
    phases = timeline.clock.totals_ms()
    for served, had in zip(live, before, strict=True):
        served.wall_ms = now - served.since_ms - served.stall_ms
        for name in PHASES[:-1]:
            served.phases_ms[name] += phases.get(name, 0.0)
        served.phases_ms["host"] += max(0.0, spent - sum(phases.values()))
        if full:
            served.full_tok += len(served.answer.tokens) - had
            served.full_ms += spent / len(live)


def decode(decoder: Decoder, answer: Answer, clock: Clock) -> tuple[float, dict[str, float]]:
    """Runs one admitted request to its end.

    Args:
        decoder: holds the request as its only row.
        answer: the request's answer so far.
        clock: the decoder's.

    Returns:
        wall milliseconds, and those of draft, verify, sampling and host. The host's are what the cycles took beyond
        their phases; the wall is read around the whole loop, so that the two need not agree (the closure error).
    """
    cycles_ms = 0.0
    start = clock.now_ms()
    while not answer.finish:
        before = clock.now_ms()
        decoder.cycle()
        cycles_ms += clock.now_ms() - before
    wall_ms = clock.now_ms() - start
    decoder.retire()  # an answer of one token had no cycle to leave in
    totals = clock.totals_ms()
    phases = {name: totals.get(name, 0.0) for name in ("draft", "verify", "sampling")}
    return wall_ms, {**phases, "host": max(0.0, cycles_ms - sum(phases.values()))}
