"""Measured costs and clocks."""

from __future__ import annotations

import pytest

from engine.bench import copy_bandwidth, cycle_times, interpolate, line, measure_costs
from engine.clock import BareClock, WallClock
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from tests.conftest import make_target


@pytest.mark.alone
def test_costs_of_a_pair() -> None:
    target, draft = Runner(make_target(), 2, 400), Runner(make_target(seed=1), 2, 400)
    costs = measure_costs(target, draft, [1, 4], [32, 128], batch=2, rounds=3, name="d")
    assert [(c.context, c.batch, c.draft) for c in costs] == [(32, 2, "d"), (128, 2, "d")]
    for c in costs:
        assert sorted(c.V_ms) == [0, 1, 2, 3, 4]
        assert c.T_ms > 0 and c.t_ms > 0 and c.H_ms >= 0 and c.t_graph_ms is None
        assert set(c.prefix_kv_ms or {}) == {"fit", "difference", "bandwidth"}
        assert set(c.draft_prefix_kv_ms or {}) == {"fit", "difference", "bandwidth"}
        assert 0 < (c.bandwidth_frac or 0) < 1.5


@pytest.mark.alone
def test_a_draft_of_the_targets_size_costs_what_the_target_costs() -> None:
    """D(k) of a copy is about k single steps: the phases are told apart rightly."""
    runner, copy = Runner(make_target(), 1, 400), Runner(make_target(), 1, 400)
    times = cycle_times(runner, ModelDrafter(copy), [0, 4], 64, rounds=9)
    assert times[0]["draft"] == 0.0
    assert 2 < times[4]["draft"] / times[0]["verify"] < 6
    total = sum(times[4][name] for name in ("draft", "verify", "sampling", "host"))
    assert total == pytest.approx(times[4]["wall"], rel=0.1)


def test_a_planted_delay_lands_in_its_phase() -> None:
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    clock = WallClock(tick)
    with clock.phase("draft"):
        now[0] += 0.005
    with clock.phase("verify"):
        pass
    assert clock.totals_ms() == pytest.approx({"draft": 6.0, "verify": 1.0})
    assert clock.totals_ms() == {}
    assert BareClock().totals_ms() == {}


def test_the_decoder_reports_its_phases() -> None:
    clock = WallClock()
    target = Runner(make_target(), 1, 100)
    decoder = Decoder(target, (), ModelDrafter(Runner(make_target(), 1, 100)), 3, clock=clock)
    list(decoder.run([Request("a", (5, 6, 7), 20)]))
    assert set(clock.totals_ms()) == {"draft", "verify", "sampling"}


def test_line_and_interpolation() -> None:
    assert line([(1, 5.0), (2, 7.0), (4, 11.0)]) == pytest.approx((2.0, 3.0))
    assert line([(2, 6.0)]) == (3.0, 0.0)
    assert line([(1, 1.0), (2, 4.0)])[1] == 0.0  # a negative intercept would make k = 0 cheaper than nothing
    assert line([(1, 5.0), (2, 3.0)]) == (0.0, 4.0)
    assert interpolate(2, {1: 10.0, 5: 30.0}) == 15.0
    assert interpolate(5, {1: 10.0, 5: 30.0}) == 30.0


def test_copy_bandwidth_is_plausible() -> None:
    assert 1e8 < copy_bandwidth(nbytes=1 << 24, rounds=3) < 1e13
