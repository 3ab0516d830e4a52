"""Replays against hand-worked answers, and against the engine's own cycles."""

from __future__ import annotations

import random

import pytest

from engine.costs import Costs, cycle_ms
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.policy import Adaptive
from engine.request import Request
from engine.speculate import Decoder
from eval.replay import Trace, mixed, replay_ms, speedup
from scripts.policy_replay import compare, trace_of
from tests.engine.test_speculate import DRAFTS, TARGET

COSTS = Costs(10.0, {k: 10.0 + k for k in range(6)}, 1.0, 0.5, 0.25, 0.25)


def test_an_answer_by_hand() -> None:
    # The first token is the prefill's. k = 2: both right and a bonus, then one right and a correction.
    trace = Trace("a", "code", 9, (False, True, True, False, True, False))
    assert replay_ms(trace, COSTS, 0) == 50.0
    # The last cycle has room for one proposal only.
    assert replay_ms(trace, COSTS, 2) == cycle_ms(COSTS, 2) + cycle_ms(COSTS, 1)
    assert speedup([trace], COSTS, 2) == pytest.approx(50 / (cycle_ms(COSTS, 2) + cycle_ms(COSTS, 1)))


@pytest.mark.parametrize("k", [1, 3])
def test_a_replay_has_the_cycles_of_the_engine(k: int) -> None:
    draft, ids = Runner(DRAFTS["noise"], 1, 200), tuple(range(3, 20))
    (plain,) = Decoder(Runner(TARGET, 1, 200), ()).run([Request("a", ids, 60)])
    (drafted,) = Decoder(Runner(TARGET, 1, 200), (), ModelDrafter(draft), k).run([Request("a", ids, 60)])
    trace = trace_of(plain, "code", draft)
    assert drafted.tokens == plain.tokens and 0 < sum(trace.right) < 60
    spent = sum(cycle_ms(COSTS, c.proposed) if c.proposed else COSTS.T_ms for c in drafted.cycles)
    assert replay_ms(trace, COSTS, k) == pytest.approx(spent)


def random_traces(accept: dict[str, float], num: int) -> list[Trace]:
    rng = random.Random(0)
    return [
        Trace(f"{d}{i}", d, 100, tuple(rng.random() < a for _ in range(96)))
        for d, a in accept.items()
        for i in range(num)
    ]


def test_the_streams_are_mixed_in_turns() -> None:
    assert [t.request for t in mixed(random_traces({"a": 0.5, "b": 0.5}, 2))] == ["a0", "b0", "a1", "b1"]


def test_adaptive_is_near_the_best_k_of_each_domain_and_ahead_on_a_mixed_stream() -> None:
    """The bar: within 2% of the best fixed k by domain, and faster where no k fits all."""
    found = compare(random_traces({"code": 0.75, "math": 0.3, "qa": 0.1}, 24), COSTS, 5)
    assert all(found[d]["against_best"] > -0.02 for d in ("code", "math", "qa"))
    assert found["mixed"]["against_best"] > 0.02
    assert found["qa"]["best_k"] == 0 < found["code"]["best_k"]


def test_a_policy_forgets_a_finished_request() -> None:
    policy = Adaptive([COSTS], 4)
    trace = random_traces({"code": 0.9}, 1)[0]
    replay_ms(trace, COSTS, policy)
    assert policy.acceptance(trace.request) == policy.acceptance("another")
