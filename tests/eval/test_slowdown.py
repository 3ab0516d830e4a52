"""A planted slowdown, from the engine's clock to the verdict: it lands in its own phase, which is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.clock import WallClock
from engine.model import Runner
from eval.against import before_after
from eval.arms import Arm
from eval.decoders import EvalRequest, Load
from eval.measure import Bench
from eval.report import build_report
from tests.engine.test_speculate import DRAFTS, TARGET

STEP_MS = {"draft": 3.0, "verify": 6.0, "sampling": 1.0, "host": 0.5}


class Scripted(WallClock):
    """Time stands still but for what the script gives to each phase; a gap before the verify pass is the host's."""

    def __init__(self, script: dict[str, float], bare: bool) -> None:
        self.at, self.script, self.bare = 0.0, script, bare
        super().__init__(lambda: self.at)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.at += self.script["host"] / 1e3 if name == "verify" else 0.0
        with super().phase(name):
            self.at += self.script[name] / 1e3
            yield

    def totals_ms(self) -> dict[str, float]:
        totals = super().totals_ms()
        return {} if self.bare else totals


def report(**slow: float) -> dict[str, Any]:
    script = {**STEP_MS, **slow}
    bench = Bench(Runner(TARGET, 1, 120), {"small": Runner(DRAFTS["noise"], 1, 120)}, Load(12, ()))
    bench._clocks = {"bare": Scripted(script, True), "phased": Scripted(script, False)}
    requests = [EvalRequest(f"r{i}", "code", "short", tuple(range(3 + i, 12 + 2 * i))) for i in range(6)]
    rows = list(bench.measure(requests, [Arm("", 0), Arm("small", 2)], 0, 1))
    # Prefills run on the real clock; they play no part in shares of decoding.
    return build_report(rows, None, {}, {"domain": "code", "bootstrap": 100})


def shares(made: dict[str, Any]) -> dict[str, float]:
    cell = next(c for c in made["cells"] if c["arm"] == "draft:small@k2")
    return {name: cell["share"][name] for name in STEP_MS}


@pytest.mark.parametrize("name", list(STEP_MS))
def test_a_sleep_in_one_phase_is_attributed_to_that_phase(name: str) -> None:
    before, after = report(), report(**{name: STEP_MS[name] + 40.0})
    usual, slowed = shares(before), shares(after)
    assert {n for n in STEP_MS if slowed[n] > usual[n]} == {name}
    assert sum(slowed.values()) == pytest.approx(1.0)
    # By hand: every cycle drafts once, verifies once and samples once; only the last may draft nothing.
    script = {**STEP_MS, name: STEP_MS[name] + 40.0}
    assert slowed[name] == pytest.approx(script[name] / sum(script.values()), abs=0.06)
    assert after["verdict"]["tallest"]["phase"] == name
    found = before_after(before, after)
    assert found["most_changed"] == name and found["after"]["tallest"] == name
    assert f"{name} rose most" in found["sentence"]


@pytest.mark.parametrize(("name", "rule"), [("draft", "draft share of time"), ("sampling", "sampling share of time"),
                                            ("host", "host share of time")])  # fmt: skip
def test_the_rule_of_that_phase_speaks_with_a_gain(name: str, rule: str) -> None:
    found = next(r for r in report(**{name: 60.0})["verdict"]["reasons"] if r["rule"] == rule)
    assert not found["passed"] and found["figure"] > found["threshold"]
    assert found["predicted_gain"] > 0.1 and found["bar"] == name
