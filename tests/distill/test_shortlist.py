"""A shortlist holds what the target writes, and says what it covers."""

from __future__ import annotations

import pytest
import torch

from distill.shards import ResponseRow
from distill.shortlist import by_use, coverage, coverage_line, size_for


def row(domain: str, prompt: list[int], answer: list[int]) -> ResponseRow:
    return ResponseRow(domain, domain, prompt, answer, 0.0, "stop", False, 0, 0)


ROWS = [row("code", [9, 9, 3], [5, 5, 5, 7]), row("math", [8], [7, 5, 6])]


def test_ids_come_by_use_in_answers_then_in_prompts_then_by_number() -> None:
    order = by_use(ROWS, 12, always=(1, 4))
    assert order == [1, 4, 5, 7, 6, 9, 3, 8, 0, 2, 10, 11]


def test_coverage_is_a_share_of_the_tokens_of_each_domain() -> None:
    assert coverage(ROWS, [5, 6]) == {"code": 0.75, "math": pytest.approx(2 / 3)}
    assert coverage([row("code", [1], [])], [5]) == {}


@pytest.mark.parametrize(("share", "size"), [(0.25, 3), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_the_size_that_covers_a_share_is_the_smallest(share: float, size: int) -> None:
    order = by_use(ROWS, 12, always=(1, 4))
    assert size_for(order, ROWS[:1], share) == size
    assert coverage(ROWS[:1], order[:size])["code"] >= share
    assert coverage(ROWS[:1], order[: size - 1]).get("code", 0) < share


def test_what_is_not_covered_is_told_with_the_rows_that_it_takes() -> None:
    order = by_use(ROWS, 12, always=(1, 4))
    full = coverage_line(order, torch.tensor([1, 4, 5, 6, 7]), ROWS)
    assert full == "shortlist: 5 of 12 head rows; covers held-out answers: code 100.00%, math 100.00%"
    # A quarter of the code answer is id 7, the fourth by use; the math answer has 6 as well, the fifth.
    short = coverage_line(order, torch.tensor([1, 4, 5]), ROWS)
    assert short.endswith("code 75.00% (99% takes 4 rows), math 33.33% (99% takes 5 rows)")
