"""The grid of runs: every request under every arm, paired, one prefill shared by all arms, interleaved ABBA.

One request goes through the arms forwards, the next one of its domain and group backwards, so a machine that drifts
hurts all arms alike. Each arm runs under the bare clock (totals) and, every `phased_every` requests, under the phase
clock too (shares): at once before or after, in turns, so that little but the clock differs between the two. At batch
over 1 a set of requests takes the place of a request; each is admitted with its own prefill, read once for all arms.

An arm has one decoder for the life of the bench: graphs are captured once, and a policy remembers earlier requests, as
it would in serving. All passes over one request start from the same memory.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from engine.cache import bucket
from engine.clock import BareClock, phased
from engine.costs import Costs
from engine.model import Runner
from engine.policy import Adaptive, Policy
from engine.request import Request
from engine.speculate import Decoder
from eval.arms import Arm
from eval.decoders import EvalRequest, Load, RequestSet, build_decoder
from eval.flow import decode, serve
from eval.prefix import Prefixes
from eval.records import BASELINE, RequestRow
from eval.rowmake import blank_row, finished_row
from eval.schedule import Table
from eval.turns import Turn, next_turn

# Every third request repeats its baseline: the spread of equal runs is what tells a noisy machine.
REPEAT_EVERY = 3
# Tokens a request while a batch warms up.
WARMUP_TOK = 16


@dataclass
class Bench:
    """One target and its drafts, on which requests are measured.

    Attributes:
        target: the target; its slab has as many rows as the largest batch.
        drafts: runners by name, with as many rows.
        load: the decoding settings.
        graph: capture steps as CUDA graphs (self-speculation and trees draft eagerly all the same).
        costs: measured ones, for adaptive policies; by draft, batch and context.
        tables: of schedules, by draft; their kinds are domains.
        prefixes: prompts that were read; it keeps none unless it is given bytes.
    """

    target: Runner
    drafts: Mapping[str, Runner]
    load: Load
    graph: bool = False
    costs: Sequence[Costs] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    prefixes: Prefixes = field(default_factory=Prefixes)
    _domains: dict[str, str] = field(default_factory=dict)
    _decoders: dict[tuple[Arm, int], Decoder] = field(default_factory=dict)
    _shapes: set[tuple[int, int]] = field(default_factory=set)
    _order: int = field(default=0)
    _before: dict[Arm, Policy | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clocks = {"bare": BareClock(self.target.device), "phased": phased(self.target.device)}

    def measure(
        self,
        requests: Sequence[EvalRequest],
        arms: Sequence[Arm],
        warmup: int = 1,
        phased_every: int = 1,
        takes: Callable[[EvalRequest], bool] | None = None,
        keeps: Callable[[Arm], bool] | None = None,
        done: Container[str] = (),
    ) -> Iterator[RequestRow]:
        """Rows of all requests under all arms, one request at a time.

        Args:
            requests: the first `warmup` of them run once more in front, their rows tagged.
            arms: the baseline should be the first.
            warmup: requests that warm caches and clocks up.
            phased_every: of a domain and group, every so many requests one is timed by phase too.
            takes: asked before each request; false leaves it out. None takes all.
            keeps: asked of each arm before each request; false leaves it out. None keeps all.
            done: ids of requests that were measured before a stop; the others keep their turns.

        Yields:
            rows, as they are measured.
        """
        for request in requests[:warmup]:
            yield from self._request(request, arms, Turn(0, 1), True)
        seen: Counter[tuple[str, str]] = Counter()
        for request in requests:
            if takes is not None and not takes(request):
                continue
            turn = next_turn(seen, request.domain, request.group, phased_every)
            if request.id in done:
                continue
            left = arms if keeps is None else [arm for arm in arms if keeps(arm)]
            if self._new_shapes(1, [request], left):
                yield from self._request(request, left, Turn(1, 2), True)
            yield from self._request(request, left, turn, False)

    def measure_sets(
        self,
        sets: Sequence[RequestSet],
        arms: Sequence[Arm],
        batch: int,
        warmup: int = 1,
        phased_every: int = 1,
        takes: Callable[[RequestSet], bool] | None = None,
        done: Container[int] = (),
    ) -> Iterator[RequestRow]:
        """Rows of all sets under all arms, `batch` requests at a time.

        Args:
            sets: of requests that fit.
            arms: the baseline should be the first.
            batch: rows, 2 to those of the slabs.
            warmup: 0 leaves out the short run of the first set that warms every arm up.
            phased_every: of a domain and group, every so many sets one is timed by phase too.
            takes: asked before each set; false leaves it out. None takes all.
            done: numbers of sets that were measured before a stop.

        Yields:
            rows, set by set.
        """
        if warmup and sets:
            short = RequestSet(sets[0].index, sets[0].requests[:batch])
            memory = self._memory(arms, batch)
            load, self.load = self.load, replace(self.load, max_new=min(WARMUP_TOK, self.load.max_new))
            for arm in arms:
                yield from self._serve(short, arm, batch, "bare", True)
                self._recall(arm, batch, memory)
            self.load = load
        seen: Counter[tuple[str, str]] = Counter()
        for each in sets:
            if takes is not None and not takes(each):
                continue
            turn = next_turn(seen, each.requests[0].domain, each.requests[0].group, phased_every)
            if each.index in done:
                continue
            memory = self._memory(arms, batch)
            self.prefixes.next_set()
            if self._new_shapes(batch, each.requests, arms):
                for arm in arms:
                    yield from self._serve(each, arm, batch, "bare", True)
            for arm, clock in turn.passes(arms):
                self._recall(arm, batch, memory)
                yield from self._serve(each, arm, batch, clock, False)

    def _new_shapes(self, batch: int, requests: Sequence[EvalRequest], arms: Sequence[Arm]) -> bool:
        """With fixed shapes: do these requests reach any that no timed run had? Capturing them must not be timed."""
        if not self.target.fixed:
            return False
        past_end = self.load.max_new + max(arm.k for arm in arms)
        found = {(batch, bucket(n)) for r in requests for n in range(len(r.ids), len(r.ids) + past_end + 1)}
        new = found - self._shapes
        self._shapes |= found
        return bool(new)

    def decoder(self, arm: Arm, batch: int = 1) -> Decoder:
        """The arm's decoder at this batch; made when it is first asked for."""
        if (arm, batch) not in self._decoders:
            here = self.target, self.drafts, self.load
            table = self.tables.get(arm.draft)
            self._decoders[arm, batch] = build_decoder(arm, batch, *here, self.graph, self.costs, table, self._domains)
        return self._decoders[arm, batch]

    def learnt(self) -> dict[str, Any]:
        """What each adaptive arm knew when the request or set that is being measured began, by name; JSON-ready."""
        return {arm.name: policy.state() for arm, policy in self._before.items() if isinstance(policy, Adaptive)}

    def recall(self, arms: Sequence[Arm], batch: int, learnt: Mapping[str, Any]) -> None:
        """Gives the policies what `learnt` told before a stop."""
        for arm in arms:
            policy = self.decoder(arm, batch).policy if arm.name in learnt else None
            if isinstance(policy, Adaptive):
                policy.restore(learnt[arm.name])

    def _memory(self, arms: Sequence[Arm], batch: int) -> dict[Arm, Policy | None]:
        """What each policy knows now, before a request or set."""
        self._before = {arm: self._copied(self.decoder(arm, batch).policy) for arm in arms if arm.adaptive}
        return self._before

    def _copied(self, policy: Policy | None) -> Policy | None:
        """A policy that knows the same, and still hears of the domains of requests to come."""
        return copy.deepcopy(policy, {id(self._domains): self._domains})

    def _recall(self, arm: Arm, batch: int, memory: Mapping[Arm, Policy | None]) -> None:
        """Puts a policy back to what it knew: a second pass must not profit from the first."""
        if arm in memory:
            self.decoder(arm, batch).policy = self._copied(memory[arm])

    def _request(self, request: EvalRequest, arms: Sequence[Arm], turn: Turn, warmup: bool) -> Iterator[RequestRow]:
        need, room = len(request.ids) + self.load.max_new, self.target.max_positions
        if need > room:
            reason = f"{len(request.ids)} prompt + {self.load.max_new} new tokens exceed the target's {room} positions"
            for arm in arms:
                yield replace(self._row(request, arm, "bare", 0, warmup), error=reason)
            return
        for runner in {self.target, *self.drafts.values()}:  # nothing is laid out anew while an arm is timed
            runner.forget(need + max(arm.k for arm in arms))
        read = functools.partial(
            self.prefixes.read, ids=request.ids, row=0, clock=self._clocks["bare"], keep=not warmup
        )
        hidden, prefill_ms = read(self.target)
        draft_prefill = {
            name: read(self.drafts[name])[1]
            for name in dict.fromkeys(arm.runner for arm in arms if arm.runner in self.drafts)
            if len(request.ids) < self.drafts[name].max_positions
        }
        runs = [(arm, clock, 0) for arm, clock in turn.passes(arms)]
        if turn.index % REPEAT_EVERY == 0:
            runs += [(arm, "bare", 1) for arm in arms if arm.name == BASELINE]
        memory = self._memory(arms, 1)
        for arm, clock, repeat in runs:
            self._recall(arm, 1, memory)
            blank = self._row(request, arm, clock, repeat, warmup)
            draft_ms = draft_prefill.get(arm.runner, 0.0)
            yield self._run(replace(blank, prefill_ms=prefill_ms, draft_prefill_ms=draft_ms), request, arm, hidden)
        if warmup:  # it comes again, timed
            for arm in memory:
                self._recall(arm, 1, memory)

    def _run(self, blank: RequestRow, request: EvalRequest, arm: Arm, hidden: Tensor) -> RequestRow:
        load, clock, decoder = self.load, self._clocks[blank.clock], self.decoder(arm)
        self._domains[request.name] = request.domain
        decoder.clock = clock
        clock.totals_ms()
        start_s = time.perf_counter()
        asked = Request(request.name, request.ids, load.max_new, load.temperature)
        drafted = decoder.reads_draft(asked)
        if not drafted:  # what was read for other arms is read again when this one first drafts
            blank = replace(blank, draft_prefill_ms=0.0)
        answer = decoder.resume(asked, hidden, drafted)
        wall_ms, phases = decode(decoder, answer, clock)
        return finished_row(
            blank,
            answer,
            wall_ms=wall_ms,
            phases_ms=phases if blank.clock == "phased" else None,
            ttft_ms=blank.prefill_ms + blank.draft_prefill_ms,
            start_s=start_s,
        )

    def _serve(self, each: RequestSet, arm: Arm, batch: int, clock: str, warmup: bool) -> Iterator[RequestRow]:
        """One arm's pass over a set."""
        load, decoder = self.load, self.decoder(arm, batch)
        decoder.clock = self._clocks[clock]
        by_name = {r.name: r for r in each.requests}
        self._domains |= {name: r.domain for name, r in by_name.items()}
        asked = [Request(name, r.ids, load.max_new, load.temperature) for name, r in by_name.items()]
        for served in serve(decoder, asked, batch, decoder.clock, self.prefixes, not warmup):
            request = by_name[served.answer.request.id]
            blank = self._row(request, arm, clock, request.repeat, warmup)
            yield finished_row(
                replace(blank, batch=batch, set=each.index),
                served.answer,
                wall_ms=served.wall_ms,
                prefill_ms=served.prefill_ms,
                draft_prefill_ms=served.draft_prefill_ms,
                stall_ms=served.stall_ms,
                phases_ms=served.phases_ms if clock == "phased" else None,
                ttft_ms=served.prefill_ms + served.draft_prefill_ms,
                steady_tok=served.steady_tok,
                steady_ms=served.steady_ms,
                start_s=served.start_s,
            )

    def _row(self, request: EvalRequest, arm: Arm, clock: str, repeat: int, warmup: bool) -> RequestRow:
        """A row with all that is known before the run."""
        self._order += 1
        return blank_row(request, arm, clock, repeat, warmup, self.target, self.load, self._order)
