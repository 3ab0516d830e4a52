"""T64 on a scripted clock: what each phase of a request took, to the millisecond, and what is left to the host."""

from __future__ import annotations

import pytest

from engine.clock import WallClock
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from eval.flow import decode
from tests.engine.test_speculate import DRAFTS, TARGET


@pytest.mark.parametrize("k", [0, 3])
def test_every_look_at_the_clock_is_a_millisecond(k: int) -> None:
    """T64: each phase of each cycle takes 1 ms, the host's looks between them the rest, and nothing counts twice."""
    ticks = [0.0]

    def tick() -> float:
        ticks[0] += 0.001
        return ticks[0]

    clock = WallClock(tick)
    drafter = ModelDrafter(Runner(DRAFTS["noise"], 1, 100)) if k else None
    decoder = Decoder(Runner(TARGET, 1, 100), (), drafter, k, clock=clock)
    answer = decoder.admit(Request("r", (5, 6, 7), 20))
    clock.totals_ms()
    wall_ms, phases = decode(decoder, answer, clock)
    num, drafted = len(answer.cycles), sum(cycle.proposed > 0 for cycle in answer.cycles)
    assert num > 4 and (drafted > 2) == (k > 0)
    assert phases["draft"] == pytest.approx(drafted)
    assert phases["verify"] == phases["sampling"] == pytest.approx(num)
    # A cycle's three phases are six looks and its own two: one millisecond between each pair.
    assert phases["host"] == pytest.approx(3 * num + drafted)
    assert sum(phases.values()) == pytest.approx(5 * num + 2 * drafted)
    assert wall_ms == pytest.approx(sum(phases.values()) + num + 1)
