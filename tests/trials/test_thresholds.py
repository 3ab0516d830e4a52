"""The verdict's thresholds are a contract: a change of one is a decision, made here too."""

from __future__ import annotations

from eval.cells import Settings
from eval.rules import RULES
from eval.verdict import _domain

THRESHOLDS = {
    "requests measured": (">=", "needed"),
    "end-to-end speedup by the objective": (">=", "min_speedup"),
    "low end of its 95% interval, against no speculation": (">=", 1.0),
    "draft against prompt look-up": (">=", 1.0),
    "same text as the baseline (greedy, float32)": (">=", 1.0),
    "ceiling of a perfect, free draft": (">=", "min_speedup"),
    "acceptance above break-even": (">=", 0.0),
    "acceptance of the first proposed token": (">=", 0.40),
    "draft share of time": ("<=", 0.25),
    "launch-bound index of the draft": ("<=", 0.50),
    "prefix KV share of time": ("<=", 0.20),
    "host share of time": ("<=", 0.10),
    "share of time wasted on rejected tokens": ("<=", 0.25),
    "acceptance lost from the training domain to the worst": ("<=", 0.15),
    "requests made slower": ("<=", 0.10),
    "share of all request time in which the draft reads the prompts too": ("<=", 0.05),
    "spread of repeated baselines": ("<=", 0.05),
    "phase closure error": ("<=", 0.02),
    "error of the predicted speedup": ("<=", 0.05),
}


def test_thresholds_are_the_stated_ones() -> None:
    """T59, T63: what decides is in one table, and nobody moves it by chance."""
    found = {rule.name: (rule.passes, rule.threshold) for rule in RULES}
    assert {name: found.get(name) for name in THRESHOLDS} == THRESHOLDS
    assert Settings().min_speedup == 1.05 and Settings().min_requests == 5


def test_a_domain_pays_only_where_that_is_sure() -> None:
    """T59: 1.2x with an interval that reaches under 1 is no gain yet."""
    for low, pays in ((1.0, True), (0.99, False), (None, False)):
        speed = {"objective": 1.2, "objective_low": low, "objective_high": 1.4}
        cell = {"latency_speedup": speed, "alpha": 0.5, "tau": 2.0, "num_requests": 9}
        assert _domain(cell, Settings())["pays"] is pays
