"""The cost model from rows: planted costs come back, held-out cells are predicted, what-ifs agree with the truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import costs as model
from eval.cell_parts import mean_request
from eval.explain import ceilings, explain, prefix_kv
from eval.predict import error_of, fit_rows, held_out, modelled, prefill_curve
from eval.records import arm_name, is_chain
from eval.report import build_report, write_report
from eval.whatif import Case, Question, ask, parse, usual
from tests.eval.grid import device, make_grid
from tests.eval.rows import make_row, make_run, plain


def exact(batches: tuple[int, ...] = (1, 4), **change: object) -> list:  # type: ignore[type-arg]
    return make_grid(num=4, batches=batches, noise=0.0, **change)  # type: ignore[arg-type]


def case(**change: object) -> Case:
    fitted = fit_rows(exact())
    made = Case(fitted.surfaces["small"], fitted.prefill, fitted.draft_prefill["small"], 4, 3000, 1, 96, (0.7, 0.6))
    return replace(made, **change)  # type: ignore[arg-type]


def test_rows_give_back_the_device() -> None:
    surface = fit_rows(exact()).surfaces["small"]
    assert surface.kv_ms(1) == pytest.approx(0.0012, rel=0.02)
    for context, batch in ((300, 1), (3000, 4), (6000, 2)):
        found, truth = surface.at(context, batch), device(context, batch)
        assert found.V_ms[4] == pytest.approx(truth.V_ms[4], rel=0.02)
        assert found.T_ms == pytest.approx(truth.T_ms, rel=0.02)
        assert found.t_ms == pytest.approx(truth.t_ms, rel=0.05)


def test_rows_give_back_the_prefill() -> None:
    fitted = fit_rows(exact())
    assert fitted.prefill == (pytest.approx(0.0, abs=1e-3), pytest.approx(0.36), pytest.approx(0.0, abs=1e-6))
    assert fitted.draft_prefill["small"][1] == pytest.approx(0.02)


def test_a_prefill_that_grows_with_the_square_leaves_short_prompts_their_time() -> None:
    """A line through the same prompts says that those of 300 tokens take no time at all."""

    def ms(tokens: float) -> float:
        return 20 + 0.5 * tokens + 1e-4 * tokens**2

    lengths = [100, 200, 300, 400, 3000, 3500, 8000, 8160]
    slope, at_zero = np.polyfit(lengths, [ms(n) for n in lengths], 1)
    assert at_zero + 300 * slope < 0
    a, b, c = prefill_curve([(n, ms(n)) for n in lengths])
    assert (a, b, c) == (pytest.approx(20), pytest.approx(0.5), pytest.approx(1e-4))


def test_a_prefill_curve_never_falls_and_needs_no_more_lengths_than_there_are() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(10, 9000, 6)
        curve = prefill_curve([(float(n), float(rng.uniform(5, 5000))) for n in lengths])
        assert min(curve) >= 0 and max(curve) > 0
    assert prefill_curve([]) == (0.0, 0.0, 0.0) == prefill_curve([(100, 0.0)])
    assert prefill_curve([(100, 40.0), (100, 60.0)]) == (0.0, pytest.approx(6 / 13), 0.0)  # the least relative error
    a, b, c = prefill_curve([(100, 40.0), (200, 80.0)])
    assert a + 150 * b + 150**2 * c == pytest.approx(60, rel=0.02)


def test_in_a_batch_every_request_waits_for_the_prompts_of_the_other_rows() -> None:
    """Eight rows, prompts of 1,000 tokens at 0.36 ms: while one is answered eight prompts are read, one its own."""
    alone, eight = (case(context=1000, batch=batch).request(1000, 96, batch) for batch in (1, 8))
    assert alone["prefill_ms"] == pytest.approx(360, rel=1e-3) and eight["prefill_ms"] == pytest.approx(
        8 * 360, rel=1e-3
    )
    assert eight["draft_prefill_ms"] == pytest.approx(8 * alone["draft_prefill_ms"])


def test_a_cell_in_a_batch_counts_the_time_that_rows_stood_still() -> None:
    base = [
        make_row([(0, 0, 1)] * 9, k=0, batch=4, prefill_ms=20.0, stall_ms=60.0, request_id=str(i)) for i in range(3)
    ]
    mine = [replace(row, k=2, draft="d", arm=arm_name("d", 2), draft_prefill_ms=5.0, stall_ms=70.0) for row in base]
    assert mean_request(mine, base) == {"prefill_ms": 80.0, "draft_prefill_ms": 15.0, "new_tok": 10}
    assert mean_request(mine, base, steady=True) == {"prefill_ms": 80.0, "draft_prefill_ms": 20.0, "new_tok": 10}
    alone = [replace(row, batch=1, stall_ms=0.0) for row in mine]
    assert mean_request(alone, []) == {"prefill_ms": 20.0, "draft_prefill_ms": 5.0, "new_tok": 10}


def test_every_scheme_predicts_its_held_out_cells_within_the_bar() -> None:
    found = held_out(make_grid(num=8, noise=0.01))
    assert set(found["schemes"]) == {"other requests", "other cells", "other loads", "other k"}
    for name, scheme in found["schemes"].items():
        assert scheme["mean_abs_error_frac"] <= found["bar_frac"], name
        mine = [p for p in found["points"] if p["scheme"] == name]
        assert scheme["num_cells"] == len(mine)
        assert scheme["worst_frac"] == pytest.approx(max(abs(p["error_frac"]) for p in mine))
    assert error_of(found) == max(s["mean_abs_error_frac"] for s in found["schemes"].values())
    assert {p["group"] for p in found["points"]} == {"short", "medium", "long"}


def test_a_machine_that_changes_between_cells_is_predicted_badly() -> None:
    """The figure is a measurement, not a compliment: cells that do not share their costs show up in it."""
    rows = make_grid(num=6, batches=(1,), contexts={"short": 250}, noise=0.0)
    odd = [
        replace(r, wall_ms=r.wall_ms * 1.5, phases_ms=r.phases_ms and {n: 1.5 * v for n, v in r.phases_ms.items()})
        if r.domain == "qa" and r.k
        else r
        for r in rows
    ]
    error = error_of(held_out(odd))
    assert error is not None and error > 0.15


def test_only_chains_are_fitted_and_predicted() -> None:
    rows = make_run(num=6, ks=(1, 3))
    assert not [r for r in rows if modelled(r) and r.draft == "lookup"]
    adaptive = [replace(r, arm="draft:code-5pct@adaptive3", policy="adaptive") for r in rows if r.k == 3]
    adaptive = [r for r in adaptive if r.draft == "code-5pct"]
    assert not any(modelled(r) or is_chain(r) for r in adaptive)
    kept = [r for r in rows if not r.warmup and r.error is None]
    assert {p["k"] for p in held_out(kept + adaptive)["points"]} == {1, 3}


def test_a_chain_is_told_by_its_fields_not_by_its_name() -> None:
    """Another rule of acceptance or temperature of the draft changes the arm's name and is a chain all the same."""
    rows = make_grid(num=6, batches=(1,), contexts={"short": 250}, domains=("code",))
    block = [replace(r, arm=f"{r.arm}+block", rule="block") if r.k else r for r in rows]
    assert {p["k"] for p in held_out(block)["points"]} == {1, 2, 4}
    assert fit_rows(block) == fit_rows(rows)
    warm = [replace(r, arm=f"{r.arm}+t0.7", draft_temperature=0.7, cycles=r.cycles) for r in rows if r.k == 2]
    both = held_out(rows + warm)["points"]
    # Two arms of one k are two cells, each with its own acceptance.
    assert sum(p["k"] == 2 for p in both) == 2 * sum(p["k"] == 1 for p in both)
    windowed = [replace(r, arm=f"{r.arm}+recent64", recent=64) for r in rows if r.k == 2]
    assert not any(is_chain(r) for r in windowed) and all(is_chain(r) for r in block if r.k)


def test_one_cell_and_one_k_still_has_other_requests() -> None:
    found = held_out(make_grid(num=8, batches=(1,), contexts={"short": 250}, domains=("code",), ks=(2,)))
    assert list(found["schemes"]) == ["other requests"]


def test_nothing_to_predict_is_no_figure() -> None:
    for rows in ([], [plain(9)], [make_row([(3, 2, 3)])]):
        assert held_out(rows) == {"points": [], "schemes": {}, "bar_frac": 0.05}
        assert error_of(held_out(rows)) is None


# -- what if --


def test_halving_the_draft_gives_what_a_device_with_half_the_draft_gives() -> None:
    before, after = case(), ask(case(), Question(draft=0.5))
    half = fit_rows(exact(drafts={"small": 0.5})).surfaces["small"]
    reads = tuple(part / 2 for part in before.draft_prefill)
    truth = ask(replace(before, surface=half, draft_prefill=reads), Question())
    assert after["speedup"] == pytest.approx(truth["speedup"], rel=0.01)
    assert after["gain_frac"] > 0


def test_halving_verify_speeds_the_baseline_too() -> None:
    found = ask(case(), Question(verify=0.5))
    costs = case().surface.at(3048, 1)
    rest = costs.T_ms - costs.V_ms[0]
    hand = model.scaled(replace(costs, T_ms=0.5 * costs.V_ms[0] + rest), verify=0.5)
    assert found["speedup"] == pytest.approx(model.predicted_speedup(hand, 4, (0.7, 0.6), 1080.0, 60.0, 96), rel=1e-3)
    assert found["gain_frac"] < 0


def test_acceptance_load_and_k() -> None:
    base = ask(case(), Question())
    assert base["gain_frac"] == pytest.approx(0.0) and base["what"] == "as it is"
    assert ask(case(), Question(alpha=0.8))["speedup"] > base["speedup"]
    perfect = ask(case(), Question(alpha=1.0, draft=0.0))
    assert perfect["speedup"] <= perfect["ceiling"] * (1 + 1e-9)
    long = ask(case(), Question(batch=4, context=8000))
    assert (long["batch"], long["context"], long["measured_load"]) == (4, 8000, True)
    assert ask(case(), Question(k=5))["k"] == 5 and not ask(case(), Question(k=5))["measured_load"]


def test_far_off_loads_are_not_guessed() -> None:
    found = ask(case(), Question(batch=64))
    assert found["speedup"] is None and "measure at such a load first" in found["why_not"]
    assert all(v is None for n, v in found.items() if n in ("ceiling", "best_k", "gain_frac", "alpha_break_even"))
    assert ask(case(), Question(batch=8))["speedup"] is not None


def test_questions_are_read_from_text() -> None:
    assert parse("batch=16,context=8192") == Question(batch=16, context=8192)
    assert parse(" draft=0.5 , k=3 ") == Question(draft=0.5, k=3)
    assert parse("alpha=1").words() == "every token accepted"
    assert parse("draft=0.5,batch=4,context=2048").words() == "draft time x 0.5, batch 4, context 2,048"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=2", "'speed' is unknown; allowed are draft, verify"),
        ("k=two", "k is 'two'; it must be a whole number"),
        ("draft=fast", "draft is 'fast'; it must be a number"),
        ("k=2,k=3", "'k' is given twice"),
        ("alpha=1.5", "an acceptance lies in 0..1"),
        ("alpha=nan", "an acceptance lies in 0..1"),
        ("draft=-1", "draft=-1.0: a factor on time, at least 0 and at most 100"),
        ("verify=0", "verify=0.0: a factor on time, above 0 and at most 100"),
        ("k=17", "allowed are 1..16"),
        ("batch=0", "allowed are 1..4096"),
        ("", "'' is unknown"),
    ],
)
def test_bad_questions_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


factors = st.floats(0.1, 1.0)


@settings(max_examples=40, deadline=None)
@given(factors, factors, st.floats(0, 1), st.floats(0, 1), st.integers(1, 4))
def test_what_ifs_are_monotone_and_under_the_ceiling(
    draft: float, cheap: float, one: float, two: float, k: int
) -> None:
    low, high = sorted((one, two))
    here = case()
    base = ask(here, Question(draft=draft, alpha=high, k=k))
    assert base["speedup"] <= base["ceiling"] * (1 + 1e-9)
    assert ask(here, Question(draft=draft, alpha=low, k=k))["speedup"] <= base["speedup"] * (1 + 1e-9)
    assert ask(here, Question(draft=draft * cheap, alpha=high, k=k))["speedup"] >= base["speedup"] * (1 - 1e-9)
    assert base["best_speedup"] >= max(1.0, base["speedup"]) * (1 - 1e-9)


def test_the_usual_questions_leave_the_own_load_out() -> None:
    asked = usual(case(context=2048, batch=4))
    assert Question(context=2048) not in asked and Question(batch=4) not in asked
    assert {Question(draft=0.5), Question(alpha=0.8), Question(batch=16, context=8192)} <= set(asked)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"policy": "adaptive"}, "adaptive, k <= 2"),
        ({"tree": (-1, 0, 0)}, "tree of 2, depth 2"),
        ({"recent": 64}, "chain, k = 2, last 64 tokens"),
    ],
)
def test_an_arm_that_is_no_chain_is_not_answered_for(tmp_path: Path, change: dict, told: str) -> None:
    """It is faster than every chain and judged; the surface of the whole draft's chains is not its own."""
    rows = make_grid(num=6, batches=(1,), contexts={"short": 250}, domains=("code",), ks=(1, 2, 4))
    other = [
        replace(
            r,
            arm=f"{r.arm}?",
            wall_ms=r.wall_ms / 2,
            phases_ms=r.phases_ms and {n: v / 2 for n, v in r.phases_ms.items()},
            **change,
        )
        for r in rows
        if r.k == 2
    ]
    report = build_report(rows + other, None, {}, {"domain": "code", "bootstrap": 50})
    assert report["verdict"]["arm"] == "draft:small@k2?"
    model_part = report["model"]
    assert model_part["what_if"] == [] and model_part["loads"] == [] and told in model_part["not_described"]
    by_model = ("draft share", "a draft token's time", "speedup if every token", "share of time in which the draft")
    for reason in report["verdict"]["reasons"]:
        assert not reason["rule"].startswith(by_model[1:])
        if reason["rule"].startswith(by_model[0]):
            assert all(r["predicted_gain"] is None for r in reason["remedies"])
    page = write_report(tmp_path, report).read_text()
    assert "n/a: the cost model describes" in page and "n/a: the cost model" in (tmp_path / "report.md").read_text()
    chain = build_report(rows, None, {}, {"domain": "code", "bootstrap": 50})
    assert chain["model"]["not_described"] == "" and chain["model"]["what_if"]


# -- the report's section --


def test_ceilings_by_load_fall_with_context_and_name_what_was_measured() -> None:
    loads = ceilings(case())
    one = [x for x in loads if x["batch"] == 1]
    assert [x["ceiling"] for x in one] == sorted((x["ceiling"] for x in one), reverse=True)
    assert all(x["predicted"] <= x["perfect"] * (1 + 1e-9) <= x["ceiling"] * (1 + 2e-9) for x in loads)
    assert {x["batch"] for x in loads} == {1, 4} and all(x["measured_load"] for x in one if x["context"] > 200)


def test_prefix_kv_three_ways_with_the_flag() -> None:
    near = replace(device(512, 1), prefix_kv_ms={"fit": 1.0, "difference": 1.1, "bandwidth": 0.98})
    far = replace(near, prefix_kv_ms={"fit": 2.0, "difference": 2.2, "bandwidth": 0.4})
    one, two = prefix_kv([near, far, device(128, 1)])
    assert (one["fit_ms"], one["difference_ms"], one["bandwidth_ms"], one["median_ms"]) == (1.0, 1.1, 0.98, 1.0)
    assert one["spread_frac"] == pytest.approx(0.12) and one["reliable"]
    assert two["spread_frac"] == pytest.approx(0.9) and not two["reliable"]
    assert one["share_frac"] == pytest.approx(1.0 / sorted(near.V_ms.values())[2], rel=0.05)
    drafting = replace(near, draft_prefix_kv_ms={"fit": 0.2, "difference": 0.25, "bandwidth": 0.21})
    verify, step = prefix_kv([drafting])
    assert (verify["of"], step["of"]) == ("verify pass", "draft step") and step["median_ms"] == 0.21
    assert step["share_frac"] == pytest.approx(0.21 / near.t_ms) and not step["reliable"]


def test_prefix_share_of_a_context_that_the_plan_did_not_see_comes_from_the_rows() -> None:
    from eval.cells import Settings, build_cells

    rows = exact(batches=(1,))
    cells = build_cells(rows, None, Settings(bootstrap=50, min_requests=3))
    explain(rows, None, cells, None)
    shares = {c["group"]: c["share"] for c in cells if c["arm"] == arm_name("small", 2) and c["domain"] == "code"}
    assert shares["short"]["prefix_kv"] < shares["medium"]["prefix_kv"] < shares["long"]["prefix_kv"]
    long = device(8000, 1)
    expected = 0.0012 * 8000 / model.cycle_ms(long, 2)
    assert shares["long"]["prefix_kv"] == pytest.approx(expected, rel=0.15)
