"""The grid of runs: every request under every arm, paired, one prefill shared by all arms, interleaved ABBA.

One pass goes through the arms forwards, the next one backwards, so a machine that drifts hurts all arms alike. One of
the two is timed by the bare clock (totals), the other by the phase clock (shares); which comes first alternates. With
`phased_every` over 1 the other requests take one bare pass, forwards and backwards in turn.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.clock import BareClock, Clock, phased
from engine.draft import Drafter, LookupDrafter, ModelDrafter
from engine.model import Runner
from engine.request import Answer, Request
from engine.speculate import Decoder
from engine.warp import Warp
from eval.records import BASELINE, LOOKUP, Cycle, RequestRow, arm_name

# Every third request repeats its baseline: the spread of equal runs is what tells a noisy machine.
REPEAT_EVERY = 3


@dataclass(frozen=True)
class Arm:
    """A way to decode: no draft (k = 0), the prompt look-up, or a named draft, with k proposals a cycle."""

    draft: str
    k: int

    @property
    def name(self) -> str:
        return arm_name(self.draft, self.k)


@dataclass(frozen=True)
class EvalRequest:
    """A prompt to measure with; `group` is its context class."""

    id: str
    domain: str
    group: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """How requests are decoded.

    Attributes:
        max_new: tokens a request.
        eos: ids that end an answer.
        temperature, top_p, top_k: of the target.
        draft_warps: each draft's own warping; a draft without one samples as the target does.
        seed: of the noise.
    """

    max_new: int
    eos: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_warps: Mapping[str, Warp] = field(default_factory=dict)
    seed: int = 0


@dataclass
class Bench:
    """One target and its drafts, one row each, on which requests are measured.

    Attributes:
        target: the target.
        drafts: runners by name.
        load: the decoding settings.
    """

    target: Runner
    drafts: Mapping[str, Runner]
    load: Load
    _order: int = field(default=0)

    def measure(
        self, requests: Sequence[EvalRequest], arms: Sequence[Arm], warmup: int = 1, phased_every: int = 1
    ) -> Iterator[RequestRow]:
        """Rows of all requests under all arms.

        Args:
            requests: the first `warmup` of them run once more in front, their rows tagged.
            arms: the baseline should be the first.
            warmup: requests that warm caches and clocks up.
            phased_every: every so many requests one is timed by phase too.

        Yields:
            rows, as they are measured.
        """
        for index, request in enumerate([*requests[:warmup], *requests]):
            yield from self._request(request, arms, index, index < warmup, index % phased_every == 0)

    def _request(
        self, request: EvalRequest, arms: Sequence[Arm], index: int, warmup: bool, both: bool
    ) -> Iterator[RequestRow]:
        need, room = len(request.ids) + self.load.max_new, self.target.max_positions
        if need > room:
            reason = f"{len(request.ids)} prompt + {self.load.max_new} new tokens exceed the target's {room} positions"
            for arm in arms:
                yield replace(self._blank(request, arm, "bare", 0, warmup), error=reason)
            return
        ids = torch.tensor(request.ids, device=self.target.device)
        hidden, prefill_ms = self._prefill(self.target, ids)
        draft_prefill = {
            name: self._prefill(self.drafts[name], ids)[1]
            for name in dict.fromkeys(arm.draft for arm in arms if arm.draft in self.drafts)
            if len(ids) < self.drafts[name].max_positions
        }
        if both:
            clocks = ("phased", "bare") if index % 2 else ("bare", "phased")
            runs = [(arm, clocks[0], 0) for arm in arms] + [(arm, clocks[1], 0) for arm in reversed(arms)]
        else:
            runs = [(arm, "bare", 0) for arm in (reversed(arms) if index % 2 else arms)]
        if index % REPEAT_EVERY == 0:
            runs += [(arm, "bare", 1) for arm in arms if arm.name == BASELINE]
        for arm, clock, repeat in runs:
            blank = self._blank(request, arm, clock, repeat, warmup)
            draft_ms = draft_prefill.get(arm.draft, 0.0)
            yield self._run(replace(blank, prefill_ms=prefill_ms, draft_prefill_ms=draft_ms), request, arm, hidden)

    @torch.inference_mode()
    def _prefill(self, runner: Runner, ids: Tensor) -> tuple[Tensor, float]:
        """The hidden state at the prompt's last token, and the milliseconds it took."""
        clock = BareClock(runner.device)
        start = clock.now_ms()
        hidden = runner.prefill(ids)[-1].clone()
        return hidden, clock.now_ms() - start

    def _run(self, blank: RequestRow, request: EvalRequest, arm: Arm, hidden: Tensor) -> RequestRow:
        load = self.load
        clock = phased(self.target.device) if blank.clock == "phased" else BareClock(self.target.device)
        decoder = Decoder(
            self.target, load.eos, self._drafter(arm), arm.k, load.seed, load.top_k, load.top_p, clock=clock
        )
        start_s = time.perf_counter()
        answer = decoder.resume(Request(request.id, request.ids, load.max_new, load.temperature), hidden)
        wall_ms, phases = decode(decoder, answer, clock)
        return replace(
            blank,
            error=None,
            new_tok=len(answer.tokens),
            finish=answer.finish,
            cycles=tuple(Cycle(c.proposed, c.accepted, c.emitted, c.cut) for c in answer.cycles),
            wall_ms=wall_ms,
            phases_ms=phases if blank.clock == "phased" else None,
            ttft_ms=blank.prefill_ms + blank.draft_prefill_ms,
            tokens_sha=hashlib.sha1(repr(answer.tokens).encode(), usedforsecurity=False).hexdigest(),
            start_s=start_s,
        )

    def _drafter(self, arm: Arm) -> Drafter | None:
        if arm.k == 0:
            return None
        if arm.draft == LOOKUP:
            return LookupDrafter(device=self.target.device)
        return ModelDrafter(self.drafts[arm.draft], self.load.seed, self.load.draft_warps.get(arm.draft))

    def _blank(self, request: EvalRequest, arm: Arm, clock: str, repeat: int, warmup: bool) -> RequestRow:
        """A row with all that is known before the run."""
        self._order += 1
        return RequestRow(
            request_id=request.id,
            domain=request.domain,
            group=request.group,
            arm=arm.name,
            draft=arm.draft,
            k=arm.k,
            batch=1,
            context_tok=len(request.ids),
            new_tok=0,
            repeat=repeat,
            clock=clock,
            warmup=warmup,
            error="not run",
            finish="",
            cycles=(),
            wall_ms=0.0,
            prefill_ms=0.0,
            draft_prefill_ms=0.0,
            phases_ms=None,
            waste_ms=None,
            ttft_ms=0.0,
            tokens_sha="",
            device=str(self.target.device),
            dtype=str(self.target.dtype).removeprefix("torch."),
            temperature=self.load.temperature,
            seed=self.load.seed,
            start_s=time.perf_counter(),
            order=self._order,
        )


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
    totals = clock.totals_ms()
    phases = {name: totals.get(name, 0.0) for name in ("draft", "verify", "sampling")}
    return wall_ms, {**phases, "host": max(0.0, cycles_ms - sum(phases.values()))}
