"""What a budget leaves out, and what it never does."""

from __future__ import annotations

from eval.budget import Budget


def test_no_budget_takes_everything() -> None:
    budget = Budget(None)
    budget.open()
    assert all(budget.takes("code", "short", 1) for _ in range(50))
    assert budget.to_json()["skipped"] == {}


def test_cells_below_the_least_are_measured_after_the_end() -> None:
    now = [0.0]
    budget = Budget(2.0, now=lambda: now[0])
    budget.open()
    assert [budget.takes("code", "short", 2) for _ in range(3)] == [True] * 3
    now[0] = 121.0
    assert [budget.takes("code", "short", 2) for _ in range(2)] == [False] * 2
    assert [budget.takes("math", "long", 2) for _ in range(3)] == [True, True, False]
    assert budget.to_json() == {"budget_min": 2.0, "used_min": 121 / 60, "skipped": {"code, short": 2, "math, long": 1}}


def test_each_batch_has_its_part() -> None:
    now = [0.0]
    budget = Budget(10.0, 2, now=lambda: now[0])
    budget.open()
    now[0] = 301.0
    assert [budget.takes("code", "short", 1) for _ in range(2)] == [True, False]
    budget.open()
    assert [budget.takes("code", "short", 1) for _ in range(2)] == [True, True]
