"""The grid of runs on tiny real models: who runs when, what is paired, what fails."""

from __future__ import annotations

import pytest
import torch

from engine.costs import Costs
from engine.model import Runner
from engine.tree import Tree
from eval.arms import Arm
from eval.cells import Settings, build_cells
from eval.decoders import EvalRequest, Load, RequestSet
from eval.measure import Bench
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
    orders = []
    for request in REQUESTS:
        mine = [r for r in rows if r.request_id == request.id and not r.warmup and r.repeat == 0]
        # The two clocks of an arm one right after the other.
        assert [r.arm for r in mine[::2]] == [r.arm for r in mine[1::2]] and len(mine) == 6
        assert {(a.clock, b.clock) for a, b in zip(mine[::2], mine[1::2])} == {(mine[0].clock, mine[1].clock)}
        orders.append(([r.arm for r in mine[::2]], mine[0].clock))
    names = [arm.name for arm in ARMS]
    assert orders == [(names, "bare"), (names[::-1], "bare"), (names, "phased"), (names[::-1], "phased")]
    assert {r.arm for r in rows if r.repeat} == {"baseline"}
    assert [r.order for r in rows] == list(range(1, len(rows) + 1))
    assert {r.request_id for r in rows if r.warmup} == {"r0"}


def test_with_phased_every_most_requests_take_one_bare_pass_in_turns() -> None:
    rows = [r for r in rows_of(3, warmup=0) if r.repeat == 0]
    assert {r.request_id for r in rows if r.clock == "phased"} == {"r0", "r3"}
    one, two = ([r.arm for r in rows if r.request_id == name] for name in ("r1", "r2"))
    assert one == two[::-1] and len(one) == 3


def test_every_domain_has_requests_that_are_timed_by_phase() -> None:
    turns = [EvalRequest(f"{d}{i}", d, "short", tuple(range(3, 12))) for i in range(4) for d in ("code", "math", "qa")]
    rows = rows_of(3, turns, 0)
    assert {r.request_id for r in rows if r.clock == "phased"} == {
        f"{d}{i}" for d in ("code", "math", "qa") for i in (0, 3)
    }


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


COSTS = [
    Costs(10.0, {k: 10.0 + 0.1 * k for k in range(5)}, 1.0, context=16, batch=batch, draft="small") for batch in (1, 3)
]
ALL_ARMS = (
    *ARMS,
    Arm("small", 4, "adaptive"),
    Arm("small", 2, tree=Tree((-1, 0, 0, 1, 1))),
    Arm("self-1", 2),
)


def big_bench(batch: int = 1, max_new: int = 12) -> Bench:
    drafts = {"small": Runner(DRAFTS["noise"], batch, 120)}
    return Bench(Runner(TARGET, batch, 120), drafts, Load(max_new, ()), costs=COSTS)


def test_every_kind_of_arm_says_what_the_baseline_says() -> None:
    rows = list(big_bench().measure(REQUESTS, ALL_ARMS))
    assert {r.arm for r in rows} == {arm.name for arm in ALL_ARMS} and len({r.arm for r in rows}) == 6
    for request in REQUESTS:
        assert len({r.tokens_sha for r in rows if r.request_id == request.id}) == 1
    tree = next(r for r in rows if r.tree)
    assert tree.tree == (-1, 0, 0, 1, 1) and tree.label == "small tree 4" and max(c.proposed for c in tree.cycles) == 2
    assert {r.policy for r in rows if "adaptive" in r.arm} == {"adaptive"}


def test_an_arm_keeps_its_decoder_and_a_policy_its_memory_but_not_over_passes() -> None:
    bench, arm = big_bench(), Arm("small", 4, "adaptive")
    decoder = bench.decoder(arm)
    fresh = decoder.policy.acceptance(REQUESTS[0].name)  # type: ignore[union-attr]
    arms = (Arm("", 0), arm)
    rows = list(bench.measure(REQUESTS[:1], arms, 0))
    after_both = decoder.policy.acceptance(REQUESTS[0].name)  # type: ignore[union-attr]
    once = big_bench()
    list(once.measure(REQUESTS[:1], arms, 0, phased_every=2))
    again = list(once.measure(REQUESTS[:1], arms, 0))
    assert bench.decoder(arm) is decoder and after_both != fresh
    # Both passes start from the same memory, so they choose the same k in every cycle.
    assert len({r.cycles for r in rows if r.policy == "adaptive"}) == 1
    assert len({r.cycles for r in again if r.policy == "adaptive"}) == 1
    warmed = big_bench()
    for row in warmed.measure(REQUESTS[:1], arms, 1, phased_every=5):
        if not row.warmup:  # what warms up teaches nothing
            assert row.arm != "baseline" or warmed.decoder(arm).policy.acceptance(REQUESTS[0].name) == fresh  # type: ignore[union-attr]
            break
    single = big_bench()
    list(single.measure(REQUESTS[:1], arms[1:], 0, phased_every=5))
    assert single.decoder(arm).policy.acceptance(REQUESTS[0].name) == after_both  # type: ignore[union-attr]


def test_a_policy_that_drafts_nothing_pays_no_draft_prefill() -> None:
    verify = {k: 1.0 for k in range(5)}
    dear = [Costs(1.0, verify, 90.0, context=30, batch=batch, draft="small") for batch in (1, 2)]
    drafts = {"small": Runner(DRAFTS["noise"], 2, 120)}
    bench = Bench(Runner(TARGET, 2, 120), drafts, Load(12, ()), costs=dear)
    arms = (Arm("", 0), Arm("small", 2), Arm("small", 4, "adaptive"))
    rows = list(bench.measure(REQUESTS, arms, 0))
    rows += bench.measure_sets([RequestSet(0, tuple(REQUESTS))], arms, 2, 0)
    for row in rows:
        assert (row.draft_prefill_ms > 0) == (row.arm == "draft:small@k2")
        assert row.ttft_ms == row.prefill_ms + row.draft_prefill_ms
        if row.policy == "adaptive":
            assert sum(c.proposed > 0 for c in row.cycles) < len(row.cycles) / 2  # a probe now and then
    for request in REQUESTS:
        assert len({r.tokens_sha for r in rows if r.request_id == request.id}) == 1


@pytest.mark.parametrize("max_new", [1, 12])
def test_sets_of_requests_share_rows(max_new: int) -> None:
    ids = [f"q{i}" for i in range(6)]
    requests = tuple(EvalRequest(name, "code", "short", tuple(range(2 + i, 9 + 3 * i))) for i, name in enumerate(ids))
    sets = [RequestSet(0, requests), RequestSet(1, requests[::-1])]
    arms = [arm for arm in ALL_ARMS if arm.tree is None]
    rows = list(big_bench(4, max_new).measure_sets(sets, arms, 3, phased_every=2))
    assert {r.batch for r in rows} == {3} and {r.set for r in rows} == {0, 1}
    assert {r.request_id for r in rows if r.warmup} == {"q0", "q1", "q2"}
    kept = [r for r in rows if not r.warmup]
    assert len(kept) == 6 * len(arms) * 3  # set 0 under both clocks, set 1 under the bare one
    for request in requests:
        said = plain_greedy(list(request.ids), max_new, set())
        mine = [r for r in kept if r.request_id == request.id]
        assert len({r.tokens_sha for r in mine}) == 1 and {r.new_tok for r in mine} == {len(said)}
    if max_new > 1:
        first = [r for r in kept if r.set == 0 and r.arm == "baseline" and r.clock == "bare"]
        assert sum(r.steady_tok for r in first) == 6 * 12  # all rows are busy until all finish together
        assert all(r.steady_ms == pytest.approx(r.wall_ms / 3 + r.prefill_ms, rel=0.2) for r in first)
        waited = [r for r in first if r.request_id == "q0"]
        assert waited[0].stall_ms >= 0 and waited[0].e2e_ms > waited[0].wall_ms
        cells = build_cells(kept, None, Settings(min_requests=2, bootstrap=200))
        arm = next(c for c in cells if c["arm"] == "draft:small@k2")
        assert arm["throughput_speedup"] > 0 and len(arm["sets"]) == 2 and arm["closure_frac"] < 0.2
        assert next(c for c in cells if c["arm"] == "draft:small@adaptive4")["policy"] == "adaptive, k <= 4"


def test_a_prompt_that_comes_again_in_a_set_is_a_repeat() -> None:
    again = tuple(EvalRequest(f"q{i % 3}", "code", "short", tuple(range(2, 9 + i % 3)), i // 3) for i in range(6))
    rows = list(big_bench(3).measure_sets([RequestSet(0, again)], ARMS, 3, 0))
    assert {(r.request_id, r.repeat) for r in rows} == {(f"q{i}", n) for i in range(3) for n in range(2)}
    arm = next(c for c in build_cells(rows, None, Settings(min_requests=3, bootstrap=50)) if c["draft"] == "small")
    assert arm["status"] == "ok" and arm["num_requests"] == 3 and len(arm["pairs"]) == 3
    few = build_cells(rows, None, Settings(min_requests=4, bootstrap=50))
    assert {c["status"] for c in few} == {"insufficient"}


def test_requests_that_the_budget_does_not_take_are_left_out() -> None:
    bench = big_bench()
    rows = list(bench.measure(REQUESTS, ARMS, 1, 1, lambda request: request.id in ("r1", "r3")))
    assert {r.request_id for r in rows if not r.warmup} == {"r1", "r3"}


def test_shapes_that_would_be_captured_are_met_before_the_timed_run() -> None:
    bench = Bench(
        Runner(TARGET, 2, 250, fixed=True), {"small": Runner(DRAFTS["noise"], 2, 250, fixed=True)}, Load(12, ())
    )
    rows = list(bench.measure(REQUESTS[:3], ARMS, 0, 3))
    assert {r.request_id for r in rows if r.warmup} == {"r0"}  # 256 slots hold all three
    assert next(r for r in rows if r.request_id == "r0").warmup
    each = RequestSet(0, tuple(REQUESTS))
    rows = list(bench.measure_sets([each, each], ARMS, 2, 0))
    assert sum(r.warmup for r in rows) == len(REQUESTS) * len(ARMS)  # another number of rows is another shape


def test_adaptive_without_costs_is_refused() -> None:
    bench = Bench(Runner(TARGET, 1, 120), {"small": Runner(DRAFTS["noise"], 1, 120)}, Load(12, ()))
    with pytest.raises(ValueError, match="adaptive policy"):
        bench.decoder(Arm("small", 4, "adaptive"))


def test_overrides_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes/code.yaml", "--check", "--draft", "nowhere", "eval.num_requests=7", "eval.k=[0]"]) == 2
    assert "eval.k" in capsys.readouterr().err
