"""The cost surface: planted lines come back, and the arithmetic is monotone in costs and load."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import costs as model
from engine.costs import Costs
from engine.surface import fit_surface


def device(context: int, batch: int, ks: tuple[int, ...] = (0, 1, 2, 4), kv: float = 0.001) -> Costs:
    """A made-up device whose parts are exact lines."""
    held = batch * context
    verify = {k: 20.0 + 0.5 * batch * (k + 1) + kv * held for k in ks}
    return Costs(
        T_ms=verify[0] + 1.0 + 0.1 * (batch - 1),
        V_ms=verify,
        t_ms=2.0 + 0.2 * (batch - 1) + 0.0001 * held,
        d0_ms=0.5,
        S_ms=0.6 + 0.05 * (batch - 1),
        H_ms=0.4,
        context=context,
        batch=batch,
        draft="d",
    )


GRID = [device(c, b) for c in (200, 3000, 8000) for b in (1, 4)]


def test_surface_imports_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import engine.surface"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_planted_lines_come_back() -> None:
    surface = fit_surface(GRID)
    assert [batch for batch, _ in surface.kv] == [1, 4]
    assert surface.kv_ms(1) == pytest.approx(0.001) and surface.kv_ms(9) == pytest.approx(0.001)
    assert (surface.t.base, surface.t.per_row, surface.t.per_tok) == (
        pytest.approx(2.0), pytest.approx(0.2), pytest.approx(0.0001),
    )  # fmt: skip
    assert (surface.sampling.base, surface.sampling.per_row) == (pytest.approx(0.6), pytest.approx(0.05))
    assert surface.fit is not None and surface.fit.r2 == pytest.approx(1.0)
    assert (surface.contexts, surface.batches, surface.max_k) == ((200, 8000), (1, 4), 4)


@pytest.mark.parametrize(("context", "batch"), [(200, 1), (1500, 2), (6000, 4), (8000, 16)])
def test_loads_that_were_not_measured_are_predicted(context: int, batch: int) -> None:
    found, truth = fit_surface(GRID).at(context, batch), device(context, batch, (0, 1, 2, 3, 4))
    assert found.V_ms == pytest.approx(truth.V_ms)
    for name in ("T_ms", "t_ms", "d0_ms", "S_ms", "H_ms"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name)), name
    assert model.predicted_speedup(found, 3, 0.7) == pytest.approx(model.predicted_speedup(truth, 3, 0.7))


def test_what_lies_outside_is_called_so() -> None:
    surface = fit_surface(GRID)
    assert surface.measured(3000, 2, 4) and surface.measured(170, 1)
    assert not surface.measured(3000, 16) and not surface.measured(30_000, 1) and not surface.measured(3000, 1, 5)


def test_one_load_takes_the_plans_own_context_cost() -> None:
    one = Costs(22.0, {0: 20.0, 2: 23.0}, 2.0, context=100, draft="d", prefix_kv_ms={"fit": 0.5})
    surface = fit_surface([one])
    assert surface.kv_ms(1) == pytest.approx(0.005)
    assert surface.verify_ms(1, 100) == pytest.approx(21.5)
    assert surface.verify_ms(1, 1100) == pytest.approx(26.5)
    assert surface.at(100).T_ms == pytest.approx(22.0)
    bare = fit_surface([Costs(22.0, {1: 23.0}, 2.0, context=100, draft="d")])
    assert bare.kv_ms(1) == 0.0 and bare.at(5000).T_ms == pytest.approx(22.0)


def test_a_token_in_the_cache_may_cost_less_in_a_batch() -> None:
    """Measured on two cores: 4.0 us at batch 1, 2.2 at 16. One slope for all was 20% off at batch 1."""
    slopes = {1: 0.004, 4: 0.003, 16: 0.0022}
    points = [
        Costs(v[0] + 1.0, v, 2.0, context=c, batch=b, draft="d")
        for b, slope in slopes.items()
        for c in (200, 3000, 8000)
        for v in [{k: 20.0 + 0.5 * b * (k + 1) + slope * b * c for k in (0, 2)}]
    ]
    surface = fit_surface(points)
    assert surface.kv == tuple((b, pytest.approx(slope)) for b, slope in slopes.items())
    assert surface.kv_ms(2) == pytest.approx(0.004 - 0.001 / 3)
    for p in points:
        assert surface.at(p.context, p.batch).V_ms[2] == pytest.approx(p.V_ms[2])
    # Batches that were measured at one context alone take the slope of the nearest batch that is known.
    few = fit_surface([p for p in points if p.batch == 1 or p.context == 200])
    assert few.kv == ((1, pytest.approx(0.004)),) and few.kv_ms(16) == few.kv_ms(1)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="a surface is of one draft"):
        fit_surface([])
    with pytest.raises(ValueError, match="batch is 0"):
        fit_surface(GRID).at(100, 0)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 0.01), st.integers(0, 20_000), st.integers(0, 20_000), st.integers(1, 32))
def test_more_context_never_costs_less(kv: float, one: int, other: int, batch: int) -> None:
    surface = fit_surface([device(c, b, kv=kv) for c in (200, 8000) for b in (1, 4)])
    low, high = sorted((one, other))
    short, long = surface.at(low, batch), surface.at(high, batch)
    for name in ("T_ms", "t_ms", "S_ms", "H_ms"):
        assert getattr(short, name) <= getattr(long, name) + 1e-9
    assert all(short.V_ms[k] <= long.V_ms[k] + 1e-9 for k in short.V_ms)
    assert all(v > 0 for v in short.V_ms.values())
