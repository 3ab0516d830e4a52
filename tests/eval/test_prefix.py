"""Prompts read once: the same answers as when each arm reads them, the same time charged, bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.cache import Slab
from engine.clock import WallClock
from engine.draft import ModelDrafter, SelfDrafter
from engine.model import Runner
from engine.request import Request
from engine.ring import Ring
from engine.speculate import Decoder
from eval.arms import Arm
from eval.decoders import EvalRequest, Load, RequestSet
from eval.flow import serve
from eval.measure import Bench
from eval.prefix import Prefix, Prefixes
from tests.engine.test_speculate import DRAFTS, TARGET

REQUESTS = tuple(EvalRequest(f"r{i}", "code", "short", tuple(range(3 + i, 14 + 3 * i))) for i in range(5))
ARMS = (Arm("", 0), Arm("small", 3), Arm("small", 2, recent=32), Arm("self-1", 2))


class Counting(Runner):
    """Writes down each prompt that it reads."""

    def __init__(self, *args, **named) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **named)
        self.read: list[int] = []

    def prefill(self, ids: Tensor, row: int = 0) -> Tensor:
        self.read.append(len(ids))
        return super().prefill(ids, row)


def bench_of(most_bytes: int, temperature: float = 0.0) -> Bench:
    drafts = {"small": Counting(DRAFTS["noise"], 2, 90)}
    drafts[ARMS[2].runner] = Counting(DRAFTS["noise"], 2, 90, recent=32)
    load = Load(12, (), temperature)
    return Bench(Counting(TARGET, 2, 90), drafts, load, prefixes=Prefixes(most_bytes))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_arms_that_read_each_prompt_themselves(temperature: float) -> None:
    sets = [RequestSet(0, REQUESTS[:4]), RequestSet(1, (*REQUESTS[2:], REQUESTS[1]))]
    found = {}
    for most in (0, 1 << 30):
        bench = bench_of(most, temperature)
        rows = [*bench.measure(REQUESTS, ARMS), *bench.measure_sets(sets, ARMS, 2)]
        found[most] = {(r.batch, r.set, r.arm, r.request_id, r.clock, r.repeat): (r.tokens_sha, r.cycles) for r in rows}
        again = [n for runner in (bench.target, *bench.drafts.values()) for n in runner.read]  # type: ignore[attr-defined]
        if most:  # each prompt once, and the one that warmed up once more
            assert sorted(again) == sorted(3 * [len(r.ids) for r in (*REQUESTS, REQUESTS[0])])
            alone = {
                (r.request_id, r.arm): (r.prefill_ms, r.draft_prefill_ms) for r in rows if r.batch == 1 and not r.warmup
            }
            for row in rows:
                if row.batch == 2 and not row.warmup:
                    read, drafted = alone[row.request_id, row.arm]
                    assert row.draft_prefill_ms == drafted or row.draft == "self-1"
                    assert row.prefill_ms >= read and row.ttft_ms == row.prefill_ms + row.draft_prefill_ms
        else:
            assert len(again) > 5 * len(REQUESTS)
    assert found[0] == found[1 << 30]


def test_time_goes_on_by_what_a_copied_prompt_took() -> None:
    ticks = iter(range(1_000_000))
    clock = WallClock(lambda: next(ticks) * 1e-3)  # every look at the clock is a millisecond later
    requests = [Request(r.name, r.ids, new) for r, new in zip(REQUESTS[:3], (6, 12, 12), strict=True)]
    plain = serve(Decoder(Runner(TARGET, 2, 90), ()), requests, 2, clock)
    prefixes, target = Prefixes(1 << 30), Runner(TARGET, 2, 90)
    for request in requests:
        prefixes.read(target, request.ids, 0, _Slow(5000.0))
    charged = serve(Decoder(target, ()), requests, 2, clock, prefixes)
    for one, other in zip(plain, charged, strict=True):
        assert other.prefill_ms == pytest.approx(one.prefill_ms - 1 + 5000)
        assert other.wall_ms == pytest.approx(one.wall_ms)  # decoding is not charged
        assert other.answer.tokens == one.answer.tokens
    # The first stood still for the second's prompt, the second for the last one's, the last for none.
    assert [round(s.stall_ms / 5000) for s in charged] == [1, 1, 0] and plain[0].stall_ms < 50


class _Slow(WallClock):
    """Every look at it is so many milliseconds later."""

    def __init__(self, step_ms: float) -> None:
        self._at = 0.0
        super().__init__(self._next)
        self._step = step_ms / 1e3

    def _next(self) -> float:
        self._at += self._step
        return self._at


@pytest.mark.parametrize("ring", [None, Ring.for_capacity(2, 32, 400)])
def test_a_row_comes_back_as_it_was(ring: Ring | None) -> None:
    slots = 400 if ring is None else ring.slots
    slab = Slab(2, 3, 2, slots, 8, torch.float32, ring=ring)
    slab.ensure(slots)
    slab._data.normal_()
    before = slab._data.clone()
    for length in (1, 70, 390):
        taken = slab.take_row(1, length)
        assert taken.numel() * 4 == slab.row_nbytes(length)
        small = Slab(2, 3, 2, slots, 8, torch.float32, ring=ring)
        small.put_row(2, taken)  # lays out as many slots as it needs
        used = min(length, slots)
        assert torch.equal(small._data[:, :, 2, :, :used], before[:, :, 1, :, :used])
        assert small._data[:, :, :2].count_nonzero() == 0
        slab._data[:, :, 1] = 0
        assert torch.equal(taken, before[:, :, 1, :, :used])  # a copy
        slab._data.copy_(before)


def test_what_took_longest_for_its_size_stays_within_the_memory() -> None:
    runner, clock = Counting(TARGET, 1, 90), WallClock()
    lengths = [40, 10, 20, 30, 50]
    most = runner.slab.row_nbytes(90)
    prefixes = Prefixes(most)
    for n in lengths:
        prefixes.read(runner, tuple(range(2, 2 + n)), 0, _Slow(n**2))
        assert sum(p.nbytes for p in prefixes._kept.values()) <= most
    assert sorted(len(ids) for _, ids in prefixes._kept) == [40, 50]
    assert runner.read == lengths
    for n in lengths:
        prefixes.read(runner, tuple(range(2, 2 + n)), 0, clock)
    assert runner.read[5:] == [10, 20, 30]
    prefixes.read(runner, tuple(range(2, 12)), 0, clock)  # there was room for it, until other requests come
    assert runner.read[8:] == []
    prefixes.next_set()
    prefixes.read(runner, tuple(range(2, 12)), 0, clock)
    assert runner.read[8:] == [10]
    none = Prefixes(0)
    none.read(runner, (2, 3), 0, clock)
    assert not none._kept


def test_what_warms_up_is_not_kept_and_self_speculation_reads_nothing() -> None:
    runner, clock = Counting(TARGET, 2, 90), WallClock()
    prefixes = Prefixes(1 << 30)
    prefixes.read(runner, (2, 3, 4), 0, clock, keep=False)
    assert not prefixes._kept
    assert prefixes.start(SelfDrafter(runner, 1), (2, 3, 4), 0, _Slow(7.0)) == pytest.approx(7) and runner.read == [3]
    draft = Counting(DRAFTS["noise"], 2, 90)
    first = prefixes.start(ModelDrafter(draft), (2, 3, 4), 0, clock)
    assert prefixes.start(ModelDrafter(draft), (2, 3, 4), 1, clock) == first and draft.read == [3]


def test_the_arms_of_a_set_share_what_is_not_kept() -> None:
    most = 1 << 24
    bench = bench_of(most)
    bench.prefixes._kept[bench.target, (0,)] = Prefix(torch.zeros(1), torch.zeros(most, dtype=torch.uint8), 1e9)
    sets = [RequestSet(0, REQUESTS[:4]), RequestSet(1, REQUESTS[:4])]
    rows = list(bench.measure_sets(sets, ARMS[:1], 2, warmup=0))
    assert {row.clock for row in rows} == {"bare", "phased"}
    assert bench.target.read == 2 * [len(r.ids) for r in REQUESTS[:4]]  # type: ignore[attr-defined]  # once a set
