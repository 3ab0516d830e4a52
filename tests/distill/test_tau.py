"""Cycles that a text would take, against a literal walk and against the closed form."""

from __future__ import annotations

import random

import pytest

from distill.tau import count_cycles
from engine.costs import tau


def walk(matches: list[int], k: int) -> tuple[int, int]:
    """Cycles and accepted tokens of greedy speculation, as the engine takes them."""
    at = cycles = accepted = 0
    while at + k + 1 <= len(matches):
        run = 0
        while run < k and matches[at + run]:
            run += 1
        cycles, accepted, at = cycles + 1, accepted + run, at + run + 1
    return cycles, accepted


@pytest.mark.parametrize("k", [1, 3, 5])
def test_greedy_is_a_literal_walk(k: int) -> None:
    rng = random.Random(k)
    texts = [[int(rng.random() < 0.6) for _ in range(rng.randrange(0, 60))] for _ in range(40)]
    counted = count_cycles(texts, k)
    expected = [sum(column) for column in zip(*(walk(text, k) for text in texts))]
    assert [counted.num, sum(counted.reached)] == pytest.approx(expected)


def test_constant_acceptance_gives_the_closed_form() -> None:
    counted = count_cycles([[0.6] * 2000], 4)
    assert counted.conditional == pytest.approx([0.6] * 4)
    assert counted.tau == pytest.approx(tau(0.6, 4))


def test_design_example_tau_counts_the_bonus_token() -> None:
    # Two of three accepted in each of 21 cycles: 63 tokens after the one from the prefill.
    counted = count_cycles([[1, 1, 0] * 21 + [1]], 3)
    assert counted.num == 21
    assert counted.tau == pytest.approx(3.0)
    assert counted.alpha == pytest.approx(2 / 3)


def test_without_a_whole_cycle_there_is_no_number() -> None:
    counted = count_cycles([[1, 1, 1], []], 3)
    assert (counted.num, counted.tau, counted.alpha) == (0, None, None)
    assert counted.conditional == [0, 0, 0]
