"""The grid of runs on tiny real models: who runs when, what is paired, what fails."""

from __future__ import annotations

import pytest
import torch

from engine.model import Runner
from eval.arms import Arm
from eval.measure import Bench, EvalRequest, Load
from eval.records import LOOKUP, RequestRow
from eval.run import main
from tests.engine.test_speculate import DRAFTS, TARGET, plain_greedy

ARMS = (Arm("", 0), Arm("small", 2), Arm(LOOKUP, 2))
REQUESTS = [EvalRequest(f"r{i}", "code", "short", tuple(range(3 + i, 12 + 2 * i))) for i in range(4)]


def rows_of(phased_every: int, requests: list[EvalRequest] = REQUESTS, warmup: int = 1) -> list[RequestRow]:
    bench = Bench(Runner(TARGET, 1, 120), {"small": Runner(DRAFTS["noise"], 1, 120)}, Load(12, ()))
    return list(bench.measure(requests, ARMS, warmup, phased_every))


def test_every_request_runs_forwards_and_backwards_with_both_clocks() -> None:
    rows = rows_of(1)
    for request in REQUESTS:
        mine = [r for r in rows if r.request_id == request.id and not r.warmup and r.repeat == 0]
        assert [r.arm for r in mine] == [r.arm for r in reversed(mine)] and len(mine) == 6
        for arm in ARMS:
            assert sorted(r.clock for r in mine if r.arm == arm.name) == ["bare", "phased"]
    assert {r.arm for r in rows if r.repeat} == {"baseline"}
    assert [r.order for r in rows] == list(range(1, len(rows) + 1))
    assert {r.request_id for r in rows if r.warmup} == {"r0"}


def test_with_phased_every_most_requests_take_one_bare_pass_in_turns() -> None:
    rows = [r for r in rows_of(3, warmup=0) if r.repeat == 0]
    assert {r.request_id for r in rows if r.clock == "phased"} == {"r0", "r3"}
    one, two = ([r.arm for r in rows if r.request_id == name] for name in ("r1", "r2"))
    assert one == two[::-1] and len(one) == 3


@pytest.mark.parametrize("every", [1, 2])
def test_all_arms_say_the_same_text_and_share_a_prefill(every: int) -> None:
    rows = rows_of(every)
    for request in REQUESTS:
        mine = [r for r in rows if r.request_id == request.id and not r.warmup]
        assert len({r.tokens_sha for r in mine}) == 1 and len({r.prefill_ms for r in mine}) == 1
        assert all(r.error is None and r.new_tok == 12 and r.wall_ms > 0 for r in mine)
        assert all(r.draft_prefill_ms == 0 for r in mine if r.draft != "small")
        assert all(r.draft_prefill_ms > 0 for r in mine if r.draft == "small")
    assert len(plain_greedy(list(REQUESTS[0].ids), 12, set())) == 12


def test_a_request_that_does_not_fit_is_a_row_with_its_reason() -> None:
    long = EvalRequest("long", "code", "short", tuple(torch.arange(115).remainder(60).tolist()))
    rows = rows_of(1, [*REQUESTS[:1], long], warmup=0)
    failed = [r for r in rows if r.error]
    assert {r.request_id for r in failed} == {"long"} and len(failed) == 3
    assert all("exceed the target's 120 positions" in str(r.error) for r in failed)


def test_overrides_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes/code.yaml", "--check", "--draft", "nowhere", "eval.num_requests=7", "eval.k=[0]"]) == 2
    assert "eval.k" in capsys.readouterr().err
