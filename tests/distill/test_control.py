"""Does size buy anything: a race without a control says so, and one with it says whether chance explains the winner."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from distill.control import Judged, beside, by_answer, mark, no_control, ratio_interval
from engine.costs import Costs, predicted_speedup


def judged(share: float, t_ms: float, num: int = 24, seed: int = 0) -> Judged:
    """Answers of 40 tokens of which a share is accepted; cycles of one proposal."""
    generator = random.Random(seed)
    texts = [[float(generator.random() < share) for _ in range(40)] for _ in range(num)]
    costs = Costs(T_ms=10.0, V_ms={0: 10.0, 1: 11.0}, t_ms=t_ms)
    return Judged(costs, 20.0, 2.0, 64, 1, {"code": by_answer(texts, 1)})


def test_cycles_of_an_answer_are_those_of_the_engine() -> None:
    # k = 2: a cycle at 0 accepts both (1, 1), the next at 3 is refused at once, the one at 4 accepts one; then the end.
    assert by_answer([[1, 1, 0, 0, 1, 0, 1, 1]], 2) == [[3.0, 2.0, 1.0]]


def test_a_speedup_is_the_models_at_the_pooled_acceptance() -> None:
    one = Judged(Costs(T_ms=10.0, V_ms={1: 11.0}, t_ms=1.0), 20.0, 2.0, 64, 1, {"a": [[4, 3], [6, 2]], "b": [[2, 2]]})
    wanted = [predicted_speedup(one.costs, 1, accept, 20.0, 2.0, 64) for accept in (0.5, 1.0)]
    assert one.speedup({"a": [0, 1], "b": [0]}) == pytest.approx(sum(wanted) / 2)
    assert Judged(one.costs, 0.0, 0.0, 64, 1, {"a": [[0, 0]]}).speedup({"a": [0]}) is None


def test_the_same_answers_leave_no_doubt_about_what_costs_more() -> None:
    low, high = ratio_interval(judged(0.6, 1.0), judged(0.6, 2.0), 0) or (0.0, 0.0)
    assert 1.0 < low <= high < 1.2
    low, high = ratio_interval(judged(0.6, 1.0, seed=1), judged(0.6, 1.0, seed=2), 0) or (2.0, 0.0)
    assert low < 1.0 < high
    assert ratio_interval(judged(0.6, 1.0, 7), judged(0.6, 2.0, 7), 0) is None


def rows(*speedups: float) -> list[dict[str, Any]]:
    found = [{"candidate": n, "draft": f"draft {n}", "speedup": value} for n, value in enumerate(speedups)]
    return sorted(found, key=lambda row: -float(str(row["speedup"])))


def test_a_table_says_of_each_control_what_it_tells() -> None:
    drafts = {0: judged(0.8, 1.0), 1: judged(0.3, 0.3, seed=1), 2: judged(0.8, 1.0)}
    drafts[2] = replace(drafts[2], domains={"code": drafts[2].domains["code"][::-1]})  # as good, on other answers
    ranked = rows(1.5, 1.2, 1.4)
    ((shown, text),) = mark(ranked, [0.09, 0.02, 0.05], drafts.__getitem__, 0)
    assert shown and text.startswith("size bought something: the winner has 1.250x the control's speedup (draft 1)")
    assert [row["control"] for row in ranked] == [False, False, True]
    assert ranked[2]["winner_over"][0] > 1 and ranked[0]["winner_over"] is None
    ((shown, text),) = mark(rows(1.5, 1.2, 1.4), [0.09, 0.05, 0.02], drafts.__getitem__, 0)
    assert not shown and "within chance of the winner" in text
    ((shown, text),) = mark(rows(1.2, 1.5), [0.09, 0.015], drafts.__getitem__, 0)
    assert not shown and text.startswith("the control won: draft 1 (1.500x)")
    assert "not known" in beside({"candidate": 0, "speedup": 1.5}, {"candidate": 1, "speedup": 1, "draft": "x"}, None)


def test_a_race_of_large_drafts_only_has_no_control() -> None:
    assert no_control([0.09, 0.02]) is None
    assert "the smallest candidate has 2.1% of the target" in str(no_control([0.09, 0.021]))
