"""The cost model on hand-worked figures, and what must hold for any costs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import costs as model
from engine.costs import Costs
from engine.fit import fit_draft, fit_verify

# T 10 ms; V(1..4) 11, 12, 13, 14; t 2; S 0.5; H 0.5: cycle(3) = 6 + 13 + 1 = 20.
HAND = Costs(10.0, {1: 11.0, 2: 12.0, 3: 13.0, 4: 14.0}, 2.0, S_ms=0.5, H_ms=0.5, device="hand", draft="d")


def test_costs_imports_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import engine.costs, engine.fit"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_tau_is_the_geometric_sum() -> None:
    assert model.tau(0.5, 3) == pytest.approx((1 - 0.5**4) / 0.5)
    assert model.tau(1.0, 3) == 4.0
    assert model.tau(0.0, 3) == 1.0


def test_tau_by_position_multiplies_the_conditionals() -> None:
    assert model.tau_by_position([0.8, 0.5, 0.25]) == pytest.approx(1 + 0.8 + 0.4 + 0.1)


def test_tau_by_position_gives_llama_cpp_sample() -> None:
    """T56: rates .805/.632/.483 sum to 1.92, so the length with the bonus token is 2.92."""
    rates = [0.805, 0.632, 0.483]
    conditional = [rates[0], rates[1] / rates[0], rates[2] / rates[1]]
    assert model.tau_by_position(conditional) == pytest.approx(2.92)


def test_cycle_and_long_answer_speedup() -> None:
    assert model.cycle_ms(HAND, 3) == pytest.approx(20.0)
    assert model.predicted_speedup(HAND, 3, 1.0) == pytest.approx(4 * 10 / 20)
    assert model.predicted_speedup(HAND, 0, 0.3) == 1.0


def test_speedup_with_prefill_and_whole_cycles() -> None:
    # Five tokens: one from the prefill, then one full cycle of k = 3 that emits four, 20 ms against 40.
    assert model.predicted_speedup(HAND, 3, 1.0, 20.0, 4.0, new_tok=5) == pytest.approx((20 + 40) / (20 + 4 + 20))
    # Two tokens: a single plain pass is left; no drafting at all, V(0) = T.
    assert model.predicted_speedup(HAND, 3, 1.0, new_tok=2) == pytest.approx(10 / (10 + 1))
    assert model.predicted_speedup(HAND, 3, 1.0, 20.0, 4.0, new_tok=1) == pytest.approx(20 / 24)


def test_decode_ms_by_hand() -> None:
    # Two tokens left, k clipped to 1, c = 0.5: cycle(1) = 14, then with 0.5 a plain pass of 11.
    assert model.decode_ms(HAND, 3, 0.5, 2) == pytest.approx(14 + 0.5 * 11)


@pytest.mark.parametrize("accept", [0.0, 0.6, 1.0, [0.9, 0.2, 0.7]])
def test_decode_ms_of_a_long_answer_is_the_whole_sum(accept: float | list[float]) -> None:
    def whole(num_tok: int) -> float:
        c = [accept] * 3 if isinstance(accept, float) else accept
        spent = [0.0]
        for left in range(1, num_tok + 1):
            k = min(3, left - 1)
            total, kept = model.cycle_ms(HAND, k), 1.0
            for a in range(k + 1):
                miss = 1 - c[a] if a < k else 1.0
                total += kept * miss * spent[left - a - 1]
                kept *= c[a] if a < k else 0.0
            spent.append(total)
        return spent[num_tok]

    for num_tok in (255, 256, 257, 258, 259, 901):
        assert model.decode_ms(HAND, 3, accept, num_tok) == pytest.approx(whole(num_tok), rel=1e-9)


def test_break_even() -> None:
    alpha = model.break_even_alpha(HAND, 3)
    assert alpha is not None and model.tau(alpha, 3) == pytest.approx(2.0, abs=1e-4)
    assert model.break_even_alpha(replace(HAND, t_ms=10.0), 3) is None
    assert model.break_even_alpha(Costs(10.0, {1: 5.0}, 0.0), 1) == 0.0


def test_needed_tau() -> None:
    assert model.needed_tau(HAND, 3, 1.5) == pytest.approx(3.0)
    assert model.needed_tau(HAND, 3, 2.5) is None


def test_ceiling_takes_the_best_k_and_keeps_prefill() -> None:
    # k = 4 with V + S + H = 15 for five tokens: 3 ms a token against 10.
    best = model.ceiling(HAND)
    assert (best.k, best.speedup) == (4, pytest.approx(10 / 3))
    assert best.s == pytest.approx(0.7) and best.speedup == pytest.approx(1 / (1 - best.s))
    assert model.ceiling(HAND, prefill_ms=100.0, new_tok=11).speedup == pytest.approx(200 / 130)
    assert model.ceiling(Costs(10.0, {1: 30.0}, 1.0)) == model.Ceiling(0.0, 1.0, 0)


def test_best_k() -> None:
    assert model.best_k(HAND, 1.0)[0] == 4
    assert model.best_k(HAND, 0.1) == (0, 1.0)
    assert model.best_k(HAND, [0.9, 0.9, 0.0])[0] == 2
    assert model.best_k(HAND, 1.0, ks=[1, 2])[0] == 2


def test_verify_between_and_outside_the_measured_k() -> None:
    sparse = Costs(10.0, {1: 11.0, 5: 15.0}, 1.0)
    assert model.verify_ms(sparse, 3) == pytest.approx(13.0)
    assert model.verify_ms(sparse, 0) == 10.0
    with pytest.raises(ValueError, match=r"V\(8\) is outside the measured k"):
        model.verify_ms(sparse, 8)


def test_waterfall_by_hand() -> None:
    steps = model.waterfall(3.0, 10.0, 12.0, 6.0, 1.0, 1.0, 1.4)
    assert [s.speedup for s in steps] == pytest.approx([3.0, 2.5, 30 / 18, 1.5, 1.4])
    assert sum(s.loss for s in steps) == pytest.approx(3.0 - 1.4)


def test_scaled_halves_draft_time() -> None:
    assert model.cycle_ms(model.scaled(HAND, draft=0.5), 3) == pytest.approx(17.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"T_ms": 0.0}, "T_ms is 0.0"),
        ({"t_ms": -1.0}, "t_ms is -1.0"),
        ({"V_ms": {}}, "V_ms is empty"),
        ({"V_ms": {17: 1.0}}, "k = 17"),
        ({"V_ms": {1: float("nan")}}, r"V_ms\[1\] is nan"),
    ],
)
def test_bad_costs_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(HAND, **change)


def test_bad_acceptance_is_named() -> None:
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="acceptance is"):
            model.predicted_speedup(HAND, 2, bad)
    with pytest.raises(ValueError, match="no acceptance"):
        model.predicted_speedup(HAND, 2, [])


def test_json_round_trip_and_unknown_keys() -> None:
    full = replace(HAND, prefix_kv_ms={"slope": 1.0}, bandwidth_frac=0.5, t_eager_ms=2.0)
    assert Costs.from_json(json.loads(json.dumps(full.to_json()))) == full
    with pytest.raises(ValueError, match=r"unknown keys \['x'\], missing keys \['T_ms'\]"):
        Costs.from_json({"V_ms": {"1": 1.0}, "t_ms": 1.0, "x": 1})


def test_plan_costs_at_the_nearest_context() -> None:
    plan = {"costs": [replace(HAND, context=c).to_json() for c in (128, 2048)]}
    found = model.costs_for(plan, "d", 1900)
    assert found is not None and found.context == 2048
    assert model.costs_for(plan, "other", 128) is None
    assert model.costs_for(plan, "d", 128, batch=4) is None


def test_fits_recover_the_lines() -> None:
    assert fit_draft({1: 3.0, 2: 5.0, 4: 9.0}) == (pytest.approx(1.0), pytest.approx(2.0))
    assert fit_draft({3: 6.0}) == (0.0, pytest.approx(2.0))
    assert fit_draft({1: 1.0, 2: 4.0})[0] == 0.0
    samples = [
        (k, b, b * c, 2.0 + 0.1 * b * (k + 1) + 0.001 * b * c) for k in (0, 3) for b in (1, 4) for c in (100, 900)
    ]
    fit = fit_verify(samples)
    assert (fit.c0, fit.c1, fit.c2) == (pytest.approx(2.0), pytest.approx(0.1), pytest.approx(0.001))
    assert fit.r2 == pytest.approx(1.0) and fit.worst_frac < 1e-9
    assert fit_verify([(k, 1, 100, 5.0 + k) for k in range(4)]).c2 == 0.0


times = st.floats(0.01, 50.0)


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    """Costs whose verify time never falls with k, as on any device."""
    steps = draw(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=6))
    first = draw(times)
    table = {k: first + sum(steps[:k]) for k in range(len(steps))}
    free = st.floats(0.0, 20.0)
    return Costs(draw(times), table, draw(free), draw(free), draw(free), draw(free))


@settings(max_examples=60, deadline=None)
@given(any_costs(), st.floats(0, 1), st.floats(0, 1), st.integers(1, 40), st.floats(0, 100))
def test_speedup_is_monotone_and_under_the_ceiling(
    costs: Costs, low: float, high: float, new_tok: int, prefill: float
) -> None:
    low, high = sorted((low, high))
    k = costs.ks[-1]
    top = model.ceiling(costs)
    assert 0.0 <= top.s < 1.0
    better = model.predicted_speedup(costs, k, high)
    assert better <= top.speedup * (1 + 1e-9)
    assert model.predicted_speedup(costs, k, low) <= better * (1 + 1e-9)
    whole = model.predicted_speedup(costs, k, high, prefill, 1.0, new_tok)
    for slower in (
        model.scaled(costs, draft=2),
        model.scaled(costs, verify=2),
        model.scaled(costs, sampling=2, host=2),
    ):
        assert model.predicted_speedup(slower, k, high) <= better * (1 + 1e-9)
        assert model.predicted_speedup(slower, k, high, prefill, 1.0, new_tok) <= whole * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(any_costs())
def test_break_even_is_where_the_prediction_crosses_one(costs: Costs) -> None:
    k = costs.ks[0]
    alpha = model.break_even_alpha(costs, k)
    if alpha is None:
        assert model.predicted_speedup(costs, k, 1.0) < 1.0
    else:
        assert model.predicted_speedup(costs, k, alpha) >= 1.0
        if alpha > 1e-5:
            assert model.predicted_speedup(costs, k, alpha - 1e-5) < 1.0
