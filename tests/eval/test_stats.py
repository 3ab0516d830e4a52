"""Every metric on rows worked by hand, then what must hold for any rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import Costs, cycle_ms
from eval import stats
from eval.bootstrap import ratio_interval, statistic_interval
from eval.cells import Settings, build_cells, overall
from eval.records import Cycle, RequestRow, measured
from eval.speedup import latency_speedup, objective_values, pair, realised_frac
from tests.eval.rows import LARGE, SMALL, make_plan, make_row, make_run, plain, timed


def phased_row(
    cycles: list[tuple[int, ...]], draft: float, verify: float, sampling: float, host: float, **kw: Any
) -> RequestRow:
    return make_row(cycles, **kw, **timed(make_row(cycles), draft, verify, sampling, host))


# -- acceptance --


def test_worked_example() -> None:
    """64 tokens, the first from the prefill, 21 cycles of k = 3, 42 accepted."""
    row = make_row([(3, 2, 3)] * 21)
    assert row.new_tok == 64
    got = stats.acceptance([row])
    assert got["tau"] == pytest.approx(3.00)
    assert got["alpha"] == pytest.approx(0.667, abs=5e-4)
    assert got["mean_accepted"] == pytest.approx(2.00)
    assert (got["drafted"], got["accepted"], got["num_cycles"]) == (63, 42, 21)


def test_t56_histogram_and_length_with_the_bonus_token() -> None:
    histogram = [11, 14, 11, 4, 0, 3]
    row = make_row([(5, a, a + 1) for a, n in enumerate(histogram) for _ in range(n)])
    got = stats.acceptance([row])
    assert got["drafted"] == 215 and got["accepted"] == 63
    assert got["alpha"] == pytest.approx(0.2930, abs=5e-5)
    assert row.new_tok - 1 == 106 and got["tau"] == pytest.approx(106 / 43)
    assert got["histogram"] == histogram and sum(histogram) == 43
    assert sum(a * n for a, n in enumerate(got["histogram"])) == 63


def test_t57_pooled_and_per_request() -> None:
    rows = [make_row([(3, 3, 4)] * 10, request_id="a"), make_row([(3, 0, 1)] * 2, request_id="b")]
    got = stats.acceptance(rows)
    assert got["tau"] == pytest.approx(3.5)
    assert got["tau_per_request"] == pytest.approx(2.5)


def test_t58_no_counters_are_not_zero_or_one() -> None:
    """A plain baseline, and a run that died before its first verify."""
    for row in (plain(5), make_row(error="died", new_tok=0), make_row(wall_ms=0.0)):
        got = stats.acceptance([row])
        assert got["alpha"] is None and got["tau"] is None and got["tau_ci"] is None
        assert got["accept_by_position"] == [] and got["histogram"] == []


def test_acceptance_by_position() -> None:
    row = make_row([(3, 0, 1), (3, 1, 2), (3, 3, 4), (3, 3, 4), (1, 1, 2)], finish="eos")
    first, second, third = stats.acceptance([row])["accept_by_position"]
    assert (first["A"], first["c"], first["num"]) == (4 / 5, 4 / 5, 5)
    # Only cycles that proposed at least two: one of four fell at the first, one at the second.
    assert (second["A"], second["c"], second["num"]) == (2 / 4, 2 / 3, 3)
    assert (third["A"], third["c"], third["num"]) == (2 / 4, 1.0, 2)


def test_cut_cycles_leave_acceptance_and_stay_in_time() -> None:
    row = make_row([(3, 1, 2), (3, 3, 1, True)], finish="eos", wall_ms=30.0)
    got = stats.acceptance([row])
    assert got["tau"] == 2.0 and got["num_cut"] == 1
    assert stats.token_ms([row]) == pytest.approx(10.0)


def test_repeats_that_went_the_same_way_count_once() -> None:
    rows = [make_row([(3, 1, 2)], repeat=i) for i in range(3)]
    assert stats.acceptance(rows)["num_cycles"] == 1
    rows.append(make_row([(3, 2, 3)], repeat=3))
    assert stats.acceptance(rows)["num_cycles"] == 2


def test_cycles_that_proposed_nothing_count_in_tau_and_apart() -> None:
    got = stats.acceptance([make_row([(2, 2, 3), (0, 0, 1)], finish="eos", draft="lookup")])
    assert got["tau"] == 2.0 and got["alpha"] == 1.0 and got["num_plain"] == 1


def test_tau_interval_resamples_requests() -> None:
    same = [make_row([(3, 2, 3)] * 4, request_id=str(i)) for i in range(5)]
    assert stats.acceptance(same)["tau_ci"] == [3.0, 3.0]
    mixed = [make_row([(3, i % 4, i % 4 + 1)] * 4, request_id=str(i)) for i in range(12)]
    got = stats.acceptance(mixed)
    low, high = got["tau_ci"]
    assert low < got["tau"] < high
    assert stats.acceptance(mixed[:1])["tau_ci"] is None


# -- time --


def test_baseline_time_a_token() -> None:
    rows = [plain(11, wall_ms=100.0), plain(6, wall_ms=40.0, request_id="b")]
    assert stats.token_ms(rows) == pytest.approx(140 / 15)
    assert stats.token_ms([plain(1, wall_ms=0.0)]) is None


def test_timing_percentiles_over_requests() -> None:
    rows = [plain(11, wall_ms=10.0 * i, prefill_ms=0.0, ttft_ms=float(i), request_id=str(i)) for i in range(1, 22)]
    got = stats.timing(rows)
    assert got["e2e_ms"] == {"p50": pytest.approx(110.0), "p95": pytest.approx(200.0)}
    assert got["tpot_ms"] == {"p50": pytest.approx(11.0), "p95": pytest.approx(20.0)}
    assert got["ttft_ms"] == {"p50": pytest.approx(11.0), "p95": pytest.approx(20.0)}
    few = stats.timing(rows[: stats.MIN_REQUESTS_P95 - 1])
    assert few["e2e_ms"] == {"p50": pytest.approx(100.0), "p95": None}


def test_a_repeated_request_weighs_once() -> None:
    rows = [plain(11, wall_ms=w, prefill_ms=0.0, request_id=i, repeat=r) for i, r, w in
            (("a", 0, 100.0), ("a", 1, 100.0), ("a", 2, 100.0), ("b", 0, 200.0))]  # fmt: skip
    e2e = stats.timing(rows)["e2e_ms"]
    assert e2e is not None and e2e["p50"] == pytest.approx(150.0)
    assert stats.tokens_per_s(rows) == pytest.approx(1e3 * 22 / 300)


def test_throughput_of_a_batch_is_over_the_union_of_spans() -> None:
    rows = [
        plain(11, batch=2, prefill_ms=0.0, wall_ms=1000.0, start_s=0.0, request_id="a"),
        plain(11, batch=2, prefill_ms=0.0, wall_ms=1000.0, start_s=0.5, request_id="b"),
        plain(11, batch=2, prefill_ms=0.0, wall_ms=500.0, start_s=9.0, request_id="c"),
    ]
    assert stats.tokens_per_s(rows) == pytest.approx(33 / 2.0)


def test_shares_and_closure() -> None:
    row = phased_row([(3, 2, 3)], 20.0, 60.0, 10.0, 10.0)
    share, closure = stats.shares([row])
    assert share == {"draft": 0.2, "verify": 0.6, "sampling": 0.1, "host": 0.1}
    assert closure == pytest.approx(0.0)
    longer = make_row([(3, 2, 3)], clock="phased", phases_ms=row.phases_ms, wall_ms=104.0)
    assert stats.shares([longer])[1] == pytest.approx(4 / 104)
    assert stats.shares([make_row([(3, 2, 3)])]) == (None, None)


@pytest.mark.parametrize("slow", ["draft", "verify", "sampling", "host"])
def test_a_planted_slowdown_lands_in_its_phase(slow: str) -> None:
    parts = {"draft": 20.0, "verify": 60.0, "sampling": 10.0, "host": 10.0}
    before, _ = stats.shares([phased_row([(3, 2, 3)], **parts)])
    after, _ = stats.shares([phased_row([(3, 2, 3)], **{**parts, slow: parts[slow] + 50.0})])
    assert before is not None and after is not None
    grew = {name for name in parts if after[name] > before[name]}
    assert grew == {slow} and after[slow] == pytest.approx((parts[slow] + 50) / 150)


def test_spread_of_repeated_baselines() -> None:
    rows = [plain(3, wall_ms=w, repeat=i) for i, w in enumerate((95.0, 105.0))]
    assert stats.noise_frac(rows) == pytest.approx(0.10)
    assert stats.noise_frac(rows[:1]) is None
    # In a batch repeats run beside other requests: their spread says nothing about the machine.
    assert stats.noise_frac([plain(3, wall_ms=w, repeat=i, batch=4) for i, w in enumerate((95.0, 105.0))]) is None


def test_repeats_of_a_prompt_do_not_narrow_the_interval() -> None:
    """Four prompts, each four times in a batch: the interval is that of four requests."""
    gains, intervals = (1.0, 1.4, 1.8, 2.4), []
    for times in (1, 4):
        base, arm = [], []
        for i, gain in enumerate(gains):
            for n in range(times):
                common: dict[str, Any] = {"request_id": str(i), "repeat": n, "batch": 2, "prefill_ms": 0.0, "set": n}
                base.append(plain(13, wall_ms=100.0, **common))
                arm.append(make_row([(3, 2, 3)] * 4, wall_ms=100.0 / gain, **common))
        pairs = pair(base, arm)
        found = latency_speedup(pairs, "latency@p50", 500)
        assert found is not None and len(pairs) == 4
        intervals.append((found["ci_low"], found["ci_high"]))
    assert intervals[0] == pytest.approx(intervals[1])


def test_costs_from_rows() -> None:
    """V, D, S, H are shares of the bare time; D(k) gets its line from two k."""
    base = [plain(11, wall_ms=100.0), plain(11, **timed(plain(11), 0.0, 90.0, 5.0, 5.0))]
    arms = []
    for k, drafting in ((1, 3.0), (3, 7.0)):
        cycles = [(k, k, k + 1)] * 4
        total = drafting + 10.0 + k + 2.0
        arms.append(
            [
                make_row(cycles, wall_ms=4 * total, finish="eos"),
                phased_row(cycles, 4 * drafting, 4 * (10.0 + k), 4.0, 4.0, finish="eos"),
            ]
        )
    got = stats.fit_costs(base, arms, "d")
    assert got is not None
    assert got.T_ms == pytest.approx(10.0)
    assert got.V_ms == {0: pytest.approx(9.0), 1: pytest.approx(11.0), 3: pytest.approx(13.0)}
    assert (got.d0_ms, got.t_ms) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (got.S_ms, got.H_ms) == (pytest.approx(1.0), pytest.approx(1.0))
    assert cycle_ms(got, 3) == pytest.approx(22.0)
    assert stats.fit_costs([], arms, "d") is None
    assert stats.fit_costs(base, [arms[0][:1]], "d") is None


def test_waste() -> None:
    costs = Costs(10.0, {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0}, 2.0)
    row = make_row([(3, 1, 2), (3, 3, 4)])
    # Two rejected: 2 * 2 ms of drafting and V(3) - V(1) = 2 ms; the full cycle wastes nothing.
    assert stats.waste_ms([row], costs) == pytest.approx(6.0)
    assert stats.waste_ms([row], None) is None
    assert stats.waste_ms([make_row([(3, 1, 2)], waste_ms=5.0)], None) == 5.0


# -- speedup --


def test_paired_speedup_includes_both_prefills() -> None:
    base = plain(11, wall_ms=100.0, prefill_ms=20.0)
    arm = make_row([(3, 2, 3)] * 3 + [(3, 0, 1)], wall_ms=50.0, prefill_ms=20.0, draft_prefill_ms=10.0)
    (one,) = pair([base], [arm])
    assert (one.base_ms, one.arm_ms, one.speedup) == (pytest.approx(120.0), pytest.approx(80.0), pytest.approx(1.5))
    assert one.same_text
    assert pair([base], [make_row([(3, 2, 3)], request_id="other")]) == []


def test_repeats_are_averaged_and_other_lengths_go_by_token() -> None:
    base = [plain(11, wall_ms=w, prefill_ms=0.0, repeat=i) for i, w in enumerate((100.0, 400.0))]
    arm = make_row([(3, 3, 4)] * 5, wall_ms=105.0, prefill_ms=0.0, tokens_sha="other")
    (one,) = pair(base, [arm])
    # 200 ms for 11 tokens against 105 ms for 21.
    assert one.base_ms == pytest.approx(200.0) and one.speedup == pytest.approx((200 / 11) / (105 / 21))
    assert not one.same_text


def test_latency_speedup_figures() -> None:
    gains = [0.5, 1.0, 2.0, 4.0]
    base = [plain(11, wall_ms=100.0, prefill_ms=0.0, request_id=str(g)) for g in gains]
    arm = [make_row([(3, 1, 2)] * 5, wall_ms=100.0 / g, prefill_ms=0.0, request_id=str(g)) for g in gains]
    got = latency_speedup(pair(base, arm), "latency@p50")
    assert got is not None
    assert got["gmean"] == pytest.approx(math.sqrt(2.0))
    assert got["p50"] == got["objective"] == pytest.approx(1.5)
    assert got["p5"] == pytest.approx(0.575) and got["p95"] == pytest.approx(3.7)
    assert got["slower_frac"] == 0.25
    assert got["total"] == pytest.approx(400 / (200 + 100 + 50 + 25))
    assert got["ci_low"] <= got["p50"] <= got["ci_high"]
    assert latency_speedup([], "latency@p50") is None


def test_p95_objective_is_the_slow_tail_not_the_lucky_one() -> None:
    base, gain = np.full(20, 100.0), np.array([4.0] * 10 + [0.5] * 10)
    assert objective_values(base, gain, "latency@p95") == pytest.approx(0.5)
    with pytest.raises(ValueError, match="allowed are latency@p50, latency@p95"):
        objective_values(base, gain, "fast")


def test_intervals() -> None:
    assert ratio_interval([1.0], [1.0], 10, 0) is None
    assert ratio_interval([2.0, 4.0], [1.0, 2.0], 100, 0) == (2.0, 2.0)
    values = np.arange(100.0)
    found = statistic_interval(100, lambda index: values[index].mean(1), 2000, 0)
    assert found is not None
    # Standard error of the mean of 0..99 is 2.89.
    assert found[0] == pytest.approx(49.5 - 1.96 * 2.89, abs=0.6)
    assert found[1] == pytest.approx(49.5 + 1.96 * 2.89, abs=0.6)


def test_realised() -> None:
    assert realised_frac(1.5, 2.0) == 0.5
    assert realised_frac(1.5, 1.0) is None


# -- cells --


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return build_cells(measured(make_run(num=6)), make_plan(), Settings(domain="code", bootstrap=200))


def test_a_cell_has_the_fields_of_the_contract(cells: list[dict[str, Any]]) -> None:
    fields = {
        "num_requests", "alpha", "tau", "tau_ci", "accept_by_position", "T_ms", "t_eager_ms", "t_graph_ms", "V_ms",
        "share", "closure_frac", "s", "ceiling", "alpha_break_even", "latency_speedup", "slower_frac",
        "throughput_speedup", "predicted_speedup", "ttft_ms", "tpot_ms", "e2e_ms", "bandwidth_frac", "draft", "policy",
        "domain", "group", "batch",
    }  # fmt: skip
    for cell in cells:
        assert fields <= set(cell)
    arm = next(c for c in cells if c["k"])
    assert set(arm["latency_speedup"]) >= {"gmean", "p5", "p50", "p95", "ci_low", "ci_high"}
    assert set(arm["share"]) == {"draft", "verify", "prefix_kv", "sampling", "host", "waste"}
    assert arm["t_graph_ms"] is None


def test_costs_of_the_made_up_device_are_recovered(cells: list[dict[str, Any]]) -> None:
    for cell in overall(cells):
        truth = {"code-5pct": SMALL, "code-18pct": LARGE}.get(cell["draft"])
        if truth is None:
            continue
        assert cell["T_ms"] == pytest.approx(truth.T_ms, rel=0.02)
        assert cell["t_ms"] == pytest.approx(truth.t_ms, rel=0.03)
        assert cell["V_ms"] == pytest.approx(truth.V_ms[cell["k"]], rel=0.03)
        assert abs(cell["prediction_error_frac"]) < 0.05 and cell["predicted_from"] == "plan"
        assert cell["closure_frac"] < 0.02 and abs(cell["clocks"]["diff_frac"]) < 0.02


def test_the_waterfall_ends_at_the_measured_speedup(cells: list[dict[str, Any]]) -> None:
    for cell in overall(cells):
        if not cell["k"]:
            assert cell["waterfall"] == []
            continue
        first, last = cell["waterfall"][0], cell["waterfall"][-1]
        assert first["speedup"] == cell["tau"] and last["speedup"] == cell["latency_speedup"]["total"]
        assert sum(s["loss"] for s in cell["waterfall"]) == pytest.approx(first["speedup"] - last["speedup"])


def test_baseline_cells_have_no_acceptance_and_no_speedup(cells: list[dict[str, Any]]) -> None:
    for cell in (c for c in cells if not c["k"]):
        assert cell["alpha"] is None and cell["tau"] is None and cell["latency_speedup"] is None
        assert cell["share"]["draft"] == 0.0 and cell["share"]["waste"] is None


def test_break_even_is_in_the_measure_of_alpha(cells: list[dict[str, Any]]) -> None:
    """Where pooled alpha is above break-even the arm is faster, and the reverse; a few percent of margin aside."""
    for cell in cells:
        if cell["alpha_break_even"] is not None and abs(cell["latency_speedup"]["total"] - 1) > 0.03:
            assert (cell["alpha"] > cell["alpha_break_even"]) == (cell["latency_speedup"]["total"] > 1)


def test_a_windowed_draft_has_its_own_costs() -> None:
    """Its step takes half the time: so do its waste and break-even go by that step, and the plan's entry is its own."""
    rows = measured(make_run(num=8, ks=(1, 3, 5), drafts=(SMALL,), lookup=False, noise=0.0))
    narrow = replace(SMALL, t_ms=SMALL.t_ms / 2, d0_ms=0.25, t_eager_ms=0.9)
    windowed = measured(make_run(num=8, ks=(1, 3, 5), drafts=(narrow,), lookup=False, noise=0.0))
    windowed = [replace(r, arm=f"{r.arm}+recent64", recent=64) for r in windowed if r.k]
    plan = {"costs": [SMALL.to_json(), replace(narrow, draft=f"{SMALL.draft}+recent64").to_json()]}
    cells = build_cells([*rows, *windowed], plan, Settings(bootstrap=50))
    for whole in (c for c in cells if c["chain"]):
        same = (whole["k"], whole["domain"])
        own = next(c for c in cells if c["recent"] == 64 and (c["k"], c["domain"]) == same)
        assert whole["t_ms"] == pytest.approx(SMALL.t_ms, rel=0.02)
        assert own["t_ms"] == pytest.approx(narrow.t_ms, rel=0.02)
        assert own["t_eager_ms"] == 0.9 and whole["t_eager_ms"] == SMALL.t_eager_ms
        assert own["alpha_break_even"] < whole["alpha_break_even"]
        assert own["share"]["waste"] < whole["share"]["waste"] and own["ceiling"] is not None
        assert own["predicted_speedup"] is None


def test_without_a_plan_costs_come_from_the_other_domains() -> None:
    made = build_cells(measured(make_run(num=5, ks=(3,), lookup=False)), None, Settings(bootstrap=50))
    one = next(c for c in made if c["k"] and c["domain"] == "qa")
    assert one["predicted_from"] == "other domains" and abs(one["prediction_error_frac"]) < 0.1
    pooled = next(c for c in overall(made) if c["k"])
    assert pooled["predicted_speedup"] is None and pooled["bandwidth_frac"] is None


def test_too_few_requests_are_insufficient_not_a_number() -> None:
    made = build_cells(measured(make_run(num=2, ks=(3,))), None, Settings(min_requests=5, bootstrap=50))
    single = next(c for c in made if c["domain"] == "qa" and c["k"])
    assert single["status"] == "insufficient" and single["num_requests"] == 2
    assert single["alpha"] is None and single["latency_speedup"] is None and single["e2e_ms"] is None
    assert single["num_cycles"] > 0
    assert all(c["status"] == "ok" for c in overall(made))


def test_groups_are_pooled_too() -> None:
    rows = [r for g in ("short", "long") for r in make_run(num=3, ks=(2,), lookup=False, drafts=(SMALL,), seed=len(g))]
    rows = [make_row(**{**r.__dict__, "group": "long" if i > len(rows) / 2 else "short"}) for i, r in enumerate(rows)]
    made = build_cells(measured(rows), None, Settings(bootstrap=50, min_requests=1))
    assert {(c["domain"], c["group"]) for c in overall(made)} == {("all", "all")}


def test_settings_are_checked() -> None:
    for bad in ({"objective": "speed"}, {"min_requests": 0}, {"bootstrap": 0}, {"min_speedup": 0.0}):
        with pytest.raises(ValueError):
            Settings(**bad)
    assert Settings(objective="latency@p95").needed == 20
    assert Settings.of({"min_speedup": 1.2, "other": 3}).min_speedup == 1.2


# -- properties --

phase = st.floats(0.01, 100.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(phase, phase, phase, phase), min_size=1, max_size=6))
def test_shares_sum_to_one(parts: list[tuple[float, float, float, float]]) -> None:
    rows = [phased_row([(3, 2, 3)], *p, request_id=str(i)) for i, p in enumerate(parts)]
    share, closure = stats.shares(rows)
    assert share is not None and closure is not None
    assert sum(share.values()) == pytest.approx(1.0) and closure < 1e-9
    assert all(0 <= s <= 1 for s in share.values())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=6))
def test_acceptance_identities(accepted: list[list[int]]) -> None:
    rows = [make_row([(4, a, a + 1) for a in row], k=4, request_id=str(i)) for i, row in enumerate(accepted)]
    got = stats.acceptance(rows, times=50)
    assert got["tau"] == pytest.approx(1 + 4 * got["alpha"])
    assert got["tau"] == pytest.approx(1 + sum(p["A"] for p in got["accept_by_position"]))
    levels = [p["A"] for p in got["accept_by_position"]]
    assert levels == sorted(levels, reverse=True) and 0 <= got["alpha"] <= 1
    assert 1 <= got["tau"] <= 5 and sum(got["histogram"]) == got["num_cycles"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 3, 5]))
def test_ceiling_is_not_under_what_was_realised(seed: int, k: int) -> None:
    rows = measured(make_run(num=2, ks=(k,), lookup=False, seed=seed, drafts=(SMALL,), noise=0.05, new_tok=30))
    for cell in build_cells(rows, None, Settings(min_requests=1, bootstrap=10)):
        if cell["k"] and cell["realised_frac"] is not None:
            assert cell["latency_speedup"]["total"] <= cell["ceiling"]
            assert cell["realised_frac"] <= 1.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(1, 1000)), min_size=1, max_size=12), st.floats(1.0, 3.0))
def test_slower_arm_never_gains(times: list[tuple[float, float]], factor: float) -> None:
    base = [plain(3, wall_ms=b, request_id=str(i)) for i, (b, _) in enumerate(times)]
    fast = [make_row([(3, 1, 2)], wall_ms=a, request_id=str(i)) for i, (_, a) in enumerate(times)]
    slow = [make_row([(3, 1, 2)], wall_ms=a * factor, request_id=str(i)) for i, (_, a) in enumerate(times)]
    for objective in ("latency@p50", "latency@p95"):
        one, two = (latency_speedup(pair(base, arm), objective, times=10) for arm in (fast, slow))
        assert one is not None and two is not None
        for name in ("gmean", "p5", "p50", "p95", "total", "objective"):
            assert two[name] <= one[name] * (1 + 1e-9)
        assert two["slower_frac"] >= one["slower_frac"]


def test_cycle_rows_are_named_tuples() -> None:
    assert make_row([[3, 2, 3, False]]).cycles == (Cycle(3, 2, 3, False),)
