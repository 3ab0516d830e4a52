"""The two clocks in pairs: the figure, its interval, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

from eval import show
from eval.clocks import BAR_FRAC, compare_clocks, enough_pairs_frac, surely_apart_frac
from eval.records import RequestRow
from tests.eval.rows import make_row, timed


def pairs(ratios: list[float], **change: int) -> list[RequestRow]:
    """A request for each ratio: 100 ms bare, that much more by phase."""
    rows = []
    for i, ratio in enumerate(ratios):
        one = make_row([(3, 2, 3)], request_id=f"r{i}", wall_ms=100.0, **{"set": i, "batch": 1, **change})
        rows += [one, make_row([(3, 2, 3)], request_id=f"r{i}", **{"set": i, "batch": 1, **change},
                               **timed(one, 20.0 * ratio, 60.0 * ratio, 12.0 * ratio, 8.0 * ratio))]  # fmt: skip
    return rows


def test_the_median_of_pairs_and_its_interval_by_hand() -> None:
    found = compare_clocks(pairs([1.00, 1.01, 1.03]))
    assert found is not None
    assert found["diff_frac"] == pytest.approx(0.01)
    # Of three pairs a resample's median can be any of them, and is the lowest in 7 of 27 resamples.
    assert (found["low_frac"], found["high_frac"]) == pytest.approx((0.0, 0.03))
    assert found["num_pairs"] == 3 and found["status"] == "insufficient"
    assert surely_apart_frac(found) is None and enough_pairs_frac(found) == 3 / 8


@pytest.mark.parametrize(
    ("ratios", "status", "surely"),
    [
        ([1.002, 1.004, 0.999, 1.001, 1.003, 1.0, 1.002, 0.998], "within", 0.0),
        ([1.03, 1.04, 1.05, 1.03, 1.06, 1.03, 1.05, 1.04], "unreliable", 0.03),
        ([0.96, 0.95, 0.96, 0.97, 0.95, 0.96, 0.97, 0.96], "unreliable", 0.035),
        # A median of 4.5% that ten noisy requests do not show: it is no finding either way.
        ([0.90, 1.10, 0.95, 1.12, 1.05, 0.97, 1.04, 1.08, 1.06, 0.93], "not shown", 0.0),
        ([1.05] * 7, "insufficient", None),
    ],
)
def test_what_is_said(ratios: list[float], status: str, surely: float | None) -> None:
    found = compare_clocks(pairs(ratios))
    assert found is not None and found["status"] == status
    apart = surely_apart_frac(found)
    assert apart is None if surely is None else apart == pytest.approx(surely, abs=1e-9)


def test_a_true_disagreement_at_the_bar_is_seldom_called_unreliable() -> None:
    """The interval does what it says: noise of 3% around the bar itself is called unreliable about once in forty."""
    rng = np.random.default_rng(0)
    called = 0
    for _ in range(200):
        found = compare_clocks(pairs(((1 + BAR_FRAC) * np.exp(rng.normal(0, 0.03, 12))).tolist()), times=300)
        called += found is not None and found["status"] == "unreliable"
    assert called <= 14


def test_a_repeat_is_no_partner_and_a_set_is_one_pair() -> None:
    rows = pairs([1.0, 1.0])
    again = make_row([(3, 2, 3)], request_id="r0", wall_ms=300.0, repeat=1)
    assert compare_clocks([*rows, again]) == compare_clocks(rows)
    sets = [*pairs([1.04] * 5, batch=4, set=0), *pairs([1.03] * 5, batch=4, set=1), *pairs([1.05] * 5, batch=4, set=2)]
    found = compare_clocks(sets)
    assert found is not None
    assert (found["num_pairs"], found["unit"], found["status"]) == (3, "sets", "unreliable")
    assert found["diff_frac"] == pytest.approx(0.04) and surely_apart_frac(found) == pytest.approx(0.03)


def test_one_clock_alone_is_no_comparison() -> None:
    assert compare_clocks(pairs([1.0])[:1]) is None and compare_clocks([]) is None
    assert surely_apart_frac(None) is None and enough_pairs_frac(None) is None
    assert show.clocks(None) == "n/a"
    assert show.clocks(compare_clocks(pairs([1.01]))) == "+1.0%, 1 request: insufficient"
