"""The choice goes by time; the verdict says why, from one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from engine.costs import Costs
from eval.candidates import TIE_RULE, Candidate, rank
from eval.cells import Settings, build_cells
from eval.choice import RANK_KEYS, choose
from eval.records import RequestRow, measured
from eval.report import build_report
from eval.rules import RULES
from eval.verdict import decide
from tests.eval.grid import make_grid
from tests.eval.rows import LARGE, LOOKUP, SMALL, make_plan, make_row, make_run, plain

SIZES = {"code-5pct": 7_000_000, "code-18pct": 24_000_000}


def judge(
    rows: Sequence[RequestRow], plan: dict[str, Any] | None = None, sizes: dict[str, int] | None = None, **change: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choice and verdict of some rows."""
    used = Settings(**{"bootstrap": 200, "domain": "code", **change})
    cells = build_cells(measured(rows), plan, used)
    choice = choose(cells, used, sizes or SIZES)
    return choice, decide(cells, choice, used, sum(r.error is not None for r in rows))


def reason(verdict: dict[str, Any], start: str) -> dict[str, Any] | None:
    return next((r for r in verdict["reasons"] if r["rule"].startswith(start)), None)


def arms(gains: dict[str, Sequence[float]], k: int = 3, accepted: dict[str, int] | None = None) -> list[RequestRow]:
    """Bare rows in which each draft has these speedups over a 100 ms baseline, request by request."""
    rows = []
    for i in range(len(next(iter(gains.values())))):
        common: dict[str, Any] = {"request_id": str(i), "prefill_ms": 0.0, "finish": "eos"}
        rows.append(plain(13, wall_ms=100.0, **common))
        for draft, gain in gains.items():
            a = (accepted or {}).get(draft, 1)
            rows.append(make_row([(k, a, a + 1)] * (12 // (a + 1)), k=k, draft=draft, wall_ms=100 / gain[i], **common))
    return rows


# -- choice --


def test_t59_higher_acceptance_lower_speed() -> None:
    a = Candidate("draft:A@k3", "A", 3, 1.6, 900.0, alpha=0.80)
    b = Candidate("draft:B@k3", "B", 3, 2.3, 700.0, alpha=0.65)
    assert [c.draft for c in rank([a, b])] == ["B", "A"]


def test_t59_ties_go_by_the_stated_rule() -> None:
    one = Candidate("draft:A@k3", "A", 3, 2.000, 900.0, size=10)
    assert rank([one, replace(one, draft="B", arm="draft:B@k3", e2e_p95_ms=800.0)])[0].draft == "B"
    assert rank([one, replace(one, draft="B", arm="draft:B@k3", size=5)])[0].draft == "B"
    assert rank([one, replace(one, k=2, arm="draft:A@k2")])[0].k == 2
    assert rank([replace(one, draft="B", arm="draft:B@k3"), one])[0].draft == "A"
    # Within half a percent is a tie, beyond it is not.
    assert rank([one, replace(one, draft="B", arm="draft:B@k3", value=1.995, size=5)])[0].draft == "B"
    assert rank([one, replace(one, draft="B", arm="draft:B@k3", value=1.98, size=5)])[0].draft == "A"
    assert "p95" in TIE_RULE and "0.5%" in TIE_RULE
    assert rank([]) == []


def test_t59_from_rows_the_fast_draft_is_chosen_and_the_other_shown() -> None:
    rows = arms({"A": [1.6] * 8, "B": [2.3] * 8}, accepted={"A": 3, "B": 2})
    choice, verdict = judge(rows, sizes={})
    assert choice["draft"] == "B" and choice["k"] == 3
    assert choice["acceptance_best"]["draft"] == "A" and choice["acceptance_best"]["alpha"] == 1.0
    assert choice["rank_key"] == RANK_KEYS["latency@p50"] and choice["tie_rule"] == TIE_RULE
    assert verdict["go"] and "with B at k = 3" in verdict["headline"]


def test_the_inversion_on_the_made_up_device() -> None:
    choice, verdict = judge(make_run(num=8), make_plan(), domain="mixed")
    assert choice["draft"] == "code-5pct"
    assert choice["acceptance_best"]["draft"] == "code-18pct"
    assert choice["acceptance_best"]["alpha"] > next(c for c in choice["ranking"] if c["arm"] == choice["arm"])["alpha"]
    assert choice["acceptance_best"]["value"] < choice["value"]
    assert verdict["status"] == "go"


def test_the_objective_decides() -> None:
    # B is faster for most requests and much slower for the slowest ones.
    rows = arms({"A": [1.5] * 20, "B": [2.0] * 17 + [0.4] * 3})
    assert judge(rows, sizes={})[0]["draft"] == "B"
    assert judge(rows, sizes={}, objective="latency@p95")[0]["draft"] == "A"


def test_regret_and_held_out_value() -> None:
    clear, _ = judge(arms({"A": [1.5] * 10, "B": [2.0] * 10}), sizes={})
    assert clear["regret"] == pytest.approx(0.0) and clear["held_out"] == pytest.approx(2.0)
    # Two equal drafts with opposite luck: the larger of the two flatters itself.
    luck = [1.0, 2.0] * 6
    split, _ = judge(arms({"A": luck, "B": luck[::-1]}, k=2), sizes={})
    assert split["regret"] > 0.02


def test_domains_choose_for_themselves() -> None:
    choice, verdict = judge(make_run(num=8), make_plan(), domain="mixed")
    assert set(choice["by_domain"]) == {"code", "math", "qa"}
    assert all(d["regret"] >= 0 and d["value"] >= d["chosen_value"] for d in choice["by_domain"].values())
    assert set(verdict["domains"]) == {"code", "math", "qa"}
    assert verdict["domains"]["code"]["pays"]


def test_a_draft_for_one_domain_is_judged_there() -> None:
    """Only qa's requests decide; the other domains stand beside, with what they would choose themselves."""
    rows = make_run(num=8)
    choice, verdict = judge(rows, make_plan(), domain="qa")
    alone, _ = judge([r for r in rows if r.domain == "qa"], make_plan(), domain="qa")
    assert choice["domain"] == "qa" and choice["num_requests"] == alone["num_requests"] < 24
    assert choice["ranking"] == alone["ranking"] and choice["arm"] == alone["arm"]
    assert set(choice["by_domain"]) == {"code", "math"} and set(verdict["domains"]) == {"code", "math", "qa"}
    assert " on qa" in verdict["headline"]
    assert judge(rows, make_plan(), domain="mixed")[0]["domain"] == "all"


def test_the_training_domain_is_compared_with_the_worst() -> None:
    _, verdict = judge(make_run(num=8), make_plan(), domain="code")
    lost = reason(verdict, "acceptance lost from the training domain")
    domains = verdict["domains"]
    assert lost is not None
    assert lost["figure"] == pytest.approx(domains["code"]["alpha"] - min(d["alpha"] for d in domains.values()))


def test_an_arm_with_few_requests_is_left_out_and_said() -> None:
    rows = [r for r in arms({"A": [1.5] * 12, "B": [3.0] * 12}) if r.draft != "B" or int(r.request_id) < 5]
    choice, _ = judge(rows, sizes={}, min_requests=5)
    assert choice["draft"] == "A" and choice["left_out"] == ["draft:B@k3"]


@pytest.mark.parametrize("domain", ["code", "math", "mixed"])
@pytest.mark.parametrize("raced", [True, False])
def test_arms_that_a_race_dropped_take_no_requests_from_the_others(domain: str, raced: bool) -> None:
    """After a third of 140 requests in turns B has 16 of each domain: of 20 that is most, of 60 a quarter."""
    rows = [
        replace(row, domain=name, request_id=f"{name}{row.request_id}")
        for name, num in {"code": 20, "math": 60, "qa": 60}.items()
        for row in arms({"A": [1.5] * num, "B": [1.2] * num})
        if row.draft != "B" or int(row.request_id) < 16
    ]
    told = {"raced": {"after_requests": [24, 47], "dropped": {"draft:B@k3": 0.2} if raced else {}}}
    report = build_report(rows, None, {}, {"bootstrap": 200, "domain": domain, **told})
    choice = report["choice"]
    few = 20 if raced else 16
    assert choice["draft"] == "A" and choice["num_requests"] == {"code": few, "math": 60, "mixed": 140}[domain]
    assert choice["left_out"] == (["draft:B@k3"] if raced or domain != "code" else [])
    asked = {name: entry["num_requests"] for name, entry in choice["by_domain"].items()}
    assert asked == {name: num for name, num in {"code": few, "math": 60, "qa": 60}.items() if name != domain}


def test_a_race_at_batch_1_takes_nothing_out_of_larger_batches() -> None:
    used = Settings(objective="throughput@16", bootstrap=200, domain="code")
    rows = make_grid(num=8, contexts={"short": 250}, batches=(1, 16), domains=("code",), ks=(1, 2))
    cells = build_cells(rows, None, used)
    dropped = ["draft:small@k1"]
    assert choose(cells, used, {}, dropped)["left_out"] == []
    latency = Settings(bootstrap=200, domain="code")
    assert choose(build_cells(rows, None, latency), latency, {}, dropped)["left_out"] == dropped


def test_arms_are_compared_on_the_same_requests() -> None:
    # B failed on the requests where A is slow; on those that both answered A is faster.
    rows = arms({"A": [2.0] * 6 + [0.5] * 6, "B": [1.8] * 12})
    rows = [r for r in rows if r.draft != "B" or int(r.request_id) < 6]
    choice, _ = judge(rows, sizes={})
    assert choice["draft"] == "A" and choice["num_requests"] == 6


# -- verdict --


def test_every_deciding_rule_is_listed_with_its_figure() -> None:
    _, verdict = judge(make_run(num=8), make_plan(), domain="mixed")
    decided = [r for r in verdict["reasons"] if r["decides"]]
    assert len(decided) >= 4 and all(r["passed"] for r in decided)
    for r in verdict["reasons"]:
        assert {"rule", "figure", "threshold", "remedy", "predicted_gain"} <= set(r)
        assert isinstance(r["figure"], float | int)
    gains = [r["predicted_gain"] or 0 for r in verdict["reasons"] if not r["decides"]]
    assert gains == sorted(gains, reverse=True)


def test_a_request_that_is_mostly_prefill_is_diagnosed() -> None:
    """100 ms of decoding behind 300 ms of prompt: no draft can give more than 1.33x, and the rule names the prompt."""
    rows = [replace(row, prefill_ms=300.0, ttft_ms=300.0) for row in make_run(num=8)]
    _, verdict = judge(rows, make_plan(), domain="mixed")
    told = reason(verdict, "prefill's share")
    cells = build_cells(measured(rows), make_plan(), Settings(bootstrap=200, domain="mixed"))
    cell = next(c for c in cells if c["arm"] == verdict["arm"] and c["domain"] == "all")
    decoding = cell["costs"]["T_ms"] * (cell["request"]["new_tok"] - 1)
    assert (told is None) == (decoding >= 300)
    long = [replace(row, prefill_ms=9000.0, ttft_ms=9000.0) for row in rows]
    _, verdict = judge(long, make_plan(), domain="mixed")
    told = reason(verdict, "prefill's share")
    assert told is not None and told["figure"] == pytest.approx(9000 / (9000 + decoding), rel=0.02)
    assert told["predicted_gain"] > 0.1 and "keep the keys" in told["remedies"][0]["remedy"]


def test_a_draft_that_reads_long_prompts_for_long_is_diagnosed() -> None:
    """Decoding is faster, and the draft's own prefill takes it away again: no phase of decoding shows that."""
    rows = [replace(r, draft_prefill_ms=150.0 if r.k and r.draft != "lookup" else 0.0) for r in make_run(num=8)]
    _, verdict = judge(rows, make_plan(), domain="mixed")
    told = reason(verdict, "share of all request time in which the draft reads the prompts too")
    assert told is not None and told["threshold"] == 0.05
    cells = build_cells(measured(rows), make_plan(), Settings(bootstrap=200, domain="mixed"))
    cell = next(c for c in cells if c["arm"] == verdict["arm"] and c["domain"] == "all")
    whole = cell["request"]["prefill_ms"] + 150.0 + cell["decode_ms_per_tok"] * (cell["request"]["new_tok"] - 1)
    assert told["figure"] == pytest.approx(150.0 / whole) and told["figure"] > 0.05
    gain = told["remedies"][0]["predicted_gain"]
    assert gain == pytest.approx(75.0 / (whole - 75.0), rel=0.15)
    quick = [replace(r, draft_prefill_ms=1.0 if r.draft_prefill_ms else 0.0) for r in rows]
    _, verdict = judge(quick, make_plan(), domain="mixed")
    assert reason(verdict, "share of all request time in which the draft reads the prompts too") is None


def in_domains(**gains: float) -> list[RequestRow]:
    """Rows of a draft "A" with a steady speedup in each domain, and of a look-up that gives 1.2x in all of them."""
    return [
        replace(row, domain=name, request_id=f"{name}{row.request_id}")
        for name, gain in gains.items()
        for row in arms({"A": [gain] * 8, "lookup": [1.2] * 8})
    ]


def test_a_no_go_says_in_which_parts_a_draft_pays() -> None:
    _, verdict = judge(in_domains(code=1.5, math=0.8, qa=0.8), sizes={}, domain="mixed")
    assert not verdict["go"]
    assert verdict["notices"][-1] == (
        "In 1 of 3 parts a draft pays, each by its own interval: code, short, batch 1: A at k = 3 1.50x (1.50 to 1.50; "
        "look-up 1.20x)."
    )


def test_a_no_go_says_that_no_part_pays() -> None:
    _, verdict = judge(in_domains(code=1.04, math=0.8), sizes={}, domain="mixed")  # 1.04: under eval.min_speedup
    assert verdict["notices"][-1] == (
        "No draft pays in any of the 2 parts (domain, context and batch) that were measured."
    )


def test_parts_are_named_beside_a_no_go_alone() -> None:
    _, good = judge(in_domains(code=1.5, math=1.4), sizes={}, domain="mixed")
    _, only = judge(in_domains(code=0.8), sizes={}, domain="mixed")
    assert good["go"] and not only["go"]
    assert not any("parts" in notice for verdict in (good, only) for notice in verdict["notices"])


def test_the_best_three_parts_are_named_and_the_others_counted() -> None:
    gains = {"code": 1.3, "math": 1.5, "qa": 1.4, "chat": 1.2, "other": 0.5}
    _, verdict = judge(in_domains(**gains), sizes={}, domain="mixed", min_speedup=2.0)
    assert not verdict["go"] and verdict["notices"][-1].startswith("No draft pays in any of the 5 parts")
    rows = in_domains(**gains) + in_domains(**{f"slow{i}": 0.5 for i in range(6)})
    _, verdict = judge(rows, sizes={}, domain="mixed")
    told = verdict["notices"][-1]
    assert told.startswith("In 4 of 11 parts") and told.endswith("; and 1 more.")
    places = [told.index(name) for name in ("math", "qa", "code")]
    assert places == sorted(places)
    assert "chat" not in told


def test_rules_are_one_table_with_remedies() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.remedies and rule.passes in (">=", "<=") for rule in RULES)


def test_a_slow_draft_is_no_go_with_the_draft_share_named() -> None:
    """A draft half the target's depth: no k pays, and the draft's own time is what holds it back."""
    half = replace(LARGE, t_ms=14.0)
    choice, verdict = judge(make_run(num=8, drafts=(half,), lookup=False), domain="mixed")
    assert not verdict["go"] and verdict["status"] == "no-go"
    assert choice["arm"] == "baseline" and choice["k"] == 0
    assert verdict["headline"].startswith("Serve without speculation.")
    share = reason(verdict, "draft share")
    assert share is not None and share["figure"] > 0.25 and share["predicted_gain"] > 0.05
    assert reason(verdict, "acceptance above break-even") is not None


def test_predicted_gain_is_what_halving_the_draft_gives() -> None:
    half = replace(LARGE, t_ms=11.0, d0_ms=0.0)
    slow = reason(judge(make_run(num=12, ks=(2,), drafts=(half,), lookup=False, noise=0.0))[1], "draft share")
    fast = replace(half, t_ms=5.5)
    before = judge(make_run(num=12, ks=(2,), drafts=(half,), lookup=False, noise=0.0))[0]["ranking"]
    after = judge(make_run(num=12, ks=(2,), drafts=(fast,), lookup=False, noise=0.0))[0]["ranking"]
    real = after[0]["value"] / next(c for c in before if c["k"])["value"] - 1
    assert slow is not None and slow["predicted_gain"] == pytest.approx(real, abs=0.05)


def test_a_draft_must_beat_look_up() -> None:
    rows = arms({"d": [1.4] * 8, "lookup": [1.6] * 8})
    choice, verdict = judge(rows, sizes={})
    assert choice["draft"] == "lookup"
    assert not verdict["go"] and verdict["arm"] == "draft:d@k3"
    assert verdict["headline"].startswith("Prompt look-up at k = 3 is faster (1.60x)")
    failed = reason(verdict, "draft against prompt look-up")
    assert failed is not None and not failed["passed"] and failed["figure"] == pytest.approx(1.4 / 1.6)


def test_noise_between_draft_and_look_up_does_not_turn_the_headline() -> None:
    """A hair ahead or behind, with the interval over both: go or not, the headline gives the ratio and its interval."""
    gains = [1.5, 1.9, 1.4, 2.0, 1.6, 1.8, 1.3, 1.7]
    for factor, go in ((0.995, True), (1.005, False)):
        free = [g * factor for g in gains[::-1]]
        choice, verdict = judge(arms({"d": gains, "lookup": free}), sizes={})
        rival = choice["lookup"]
        assert rival["level"] and verdict["go"] is go
        said = f"{rival['value']:.2f}x, 95% interval {rival['low']:.2f} to {rival['high']:.2f}"
        assert said in verdict["headline"] and "free" in verdict["headline"] and "faster (1." not in verdict["headline"]
        assert any("no difference was shown" in n for n in verdict["notices"])


def test_a_no_go_for_another_reason_does_not_blame_look_up() -> None:
    """Look-up heads the ranking by the tie rule alone; what fails is the speedup."""
    rows = arms({"d": [1.03] * 7 + [0.9], "lookup": [1.029] * 8})
    choice, verdict = judge(rows, sizes={}, min_speedup=1.2)
    assert choice["arm"] == "lookup@k3" and choice["lookup"]["value"] > 1 and not verdict["go"]
    assert verdict["headline"].startswith("Do not ship yet.")
    rule = reason(verdict, "draft against prompt look-up")
    assert rule is not None and rule["passed"]


def test_self_speculation_is_a_control() -> None:
    """It is faster than the draft and the verdict is about the draft all the same."""
    choice, verdict = judge(arms({"d": [1.5] * 8, "self-6": [1.8] * 8}), sizes={})
    assert choice["arm"] == "self-6@k3" and verdict["arm"] == "draft:d@k3" and verdict["go"]
    assert "Self-speculation, which needs no training, was faster (1.80x)" in verdict["headline"]
    assert verdict["notices"][-1].startswith("Self-speculation, a control that needs no training, gives 1.80x")
    assert choice["acceptance_best"]["draft"] == "d"
    _, slow = judge(arms({"d": [0.9] * 8, "self-6": [1.8] * 8}), sizes={})
    assert not slow["go"] and slow["arm"] == "draft:d@k3"
    rivals, _ = judge(arms({"self-6": [1.8] * 8, "lookup": [1.2] * 8}), sizes={})
    assert rivals["lookup"] is None


def test_look_up_alone_is_judged_as_what_it_is() -> None:
    _, verdict = judge(arms({"lookup": [1.6] * 8}), sizes={})
    assert verdict["go"] and "prompt look-up at k = 3" in verdict["headline"]


def test_a_gain_that_may_be_noise_is_no_go() -> None:
    _, verdict = judge(arms({"d": [0.6, 0.7, 0.8, 1.2, 1.9, 2.0, 2.1]}), sizes={})
    assert not verdict["go"]
    low = reason(verdict, "low end of its 95% interval")
    assert low is not None and not low["passed"] and low["figure"] < 1
    speed = reason(verdict, "end-to-end speedup")
    assert speed is not None and speed["passed"]
    slower = reason(verdict, "requests made slower")
    assert slower is not None and slower["figure"] == pytest.approx(3 / 7)


def test_too_few_requests_is_insufficient() -> None:
    for rows in (arms({"d": [2.0] * 4}), arms({"d": [2.0] * 6})[:1], []):
        choice, verdict = judge(rows, sizes={})
        assert verdict["status"] == "insufficient" and not verdict["go"]
        assert choice["arm"] is None and choice["ranking"] == []
    _, verdict = judge(arms({"d": [2.0] * 12}), sizes={}, objective="latency@p95")
    assert verdict["status"] == "insufficient" and "needs 20" in verdict["headline"]


def test_no_baseline_is_said() -> None:
    _, verdict = judge([r for r in arms({"d": [2.0] * 8}) if r.k], sizes={})
    assert verdict["status"] == "insufficient" and "no baseline" in verdict["headline"]


def test_other_text_in_float32_is_a_bug_and_in_bfloat16_a_doubt() -> None:
    rows = arms({"d": [2.0] * 8})
    broken = [replace(r, tokens_sha="other") if r.k and r.request_id == "3" else r for r in rows]
    _, verdict = judge(broken, sizes={})
    exact = reason(verdict, "same text as the baseline (greedy, float32)")
    assert not verdict["go"] and exact is not None and exact["figure"] == pytest.approx(7 / 8)
    low = [replace(r, dtype="bfloat16") for r in broken]
    _, verdict = judge(low, sizes={})
    assert verdict["go"] and reason(verdict, "same text as the baseline (greedy, low") is not None
    sampled = [replace(r, temperature=0.7) for r in broken]
    _, verdict = judge(sampled, sizes={})
    assert verdict["go"] and reason(verdict, "same text") is None


def test_no_draft_can_pay_where_verifying_costs_too_much() -> None:
    """The huge batch: k + 1 tokens cost nearly k + 1 times as much."""
    table = {k: 20.9 * (k + 1) for k in range(6)}
    wide = replace(SMALL, V_ms=table, t_ms=0.5)
    _, verdict = judge(make_run(num=6, ks=(1, 3), drafts=(wide,), lookup=False, noise=0.0))
    ceiling = reason(verdict, "ceiling of a perfect, free draft")
    assert not verdict["go"] and ceiling is not None and ceiling["figure"] < 1.05
    assert "do not train" in ceiling["remedy"]


def test_a_noisy_machine_is_said() -> None:
    _, verdict = judge(make_run(num=8, noise=0.15), make_plan())
    noisy = reason(verdict, "spread of repeated baselines")
    assert noisy is not None and noisy["figure"] > 0.05


def test_domain_gap_and_launch_bound_and_prefix_kv() -> None:
    launch = replace(SMALL, t_eager_ms=2.1, t_graph_ms=0.6, prefix_kv_ms={"a": 6.0, "b": 8.0}, bandwidth_frac=0.99)
    _, verdict = judge(make_run(num=8), {"costs": [launch.to_json(), LARGE.to_json()]})
    index = reason(verdict, "launch-bound index")
    assert index is not None and index["figure"] == pytest.approx(1 - 0.6 / 2.1) and index["predicted_gain"] > 0
    prefix = reason(verdict, "prefix KV share")
    assert prefix is not None and prefix["figure"] > 0.2
    assert {r["remedy"] for r in prefix["remedies"]} == {"a smaller k, or none", "switch speculation off at this load"}
    spread = reason(verdict, "spread of the prefix KV estimates")
    assert spread is not None and spread["figure"] == pytest.approx(2 / 7)
    assert reason(verdict, "acceptance lost from the training domain") is not None
    # At batch 1 a busy memory bus is what speculation feeds on.
    assert reason(verdict, "bandwidth use") is None


def test_a_prediction_that_misses_is_said() -> None:
    wrong = replace(SMALL, t_ms=6.0)
    _, verdict = judge(make_run(num=8, drafts=(SMALL,)), {"costs": [wrong.to_json()]})
    miss = reason(verdict, "error of the predicted speedup")
    assert miss is not None and miss["figure"] > 0.05


def test_plain_values_only() -> None:
    """The report is JSON: no numpy numbers, no dataclasses."""
    choice, verdict = judge(make_run(num=5), make_plan())

    def check(value: Any) -> None:
        assert value is None or type(value) in (str, int, float, bool, list, dict, tuple), type(value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            check(inner)

    check(choice)
    check(verdict)


def test_costs_of_the_look_up_do_not_predict() -> None:
    assert isinstance(LOOKUP, Costs)
    _, verdict = judge(make_run(num=6, drafts=()), make_plan())
    assert verdict["arm"].startswith("lookup@")
    assert all(r["predicted_gain"] is None for r in verdict["reasons"] if "waste" in r["rule"])


def test_candidates_survive_json() -> None:
    assert Candidate(**asdict(Candidate("a", "d", 1, 1.0, 2.0))) == Candidate("a", "d", 1, 1.0, 2.0)


# -- what the remedies give --


def test_a_level_look_up_is_said_in_the_headline() -> None:
    """A go on a draft that a free control equals is not the whole truth."""
    gains = [1.5, 1.9, 1.4, 2.0, 1.6, 1.8, 1.3, 1.7]
    choice, verdict = judge(arms({"d": gains, "lookup": [g * s for g, s in zip(gains[::-1], [0.99] * 8)]}), sizes={})
    assert verdict["go"] and choice["lookup"]["level"]
    assert "Prompt look-up, which is free, is level with it" in verdict["headline"]
    advice = reason(verdict, "low end of the draft's 95% interval against prompt look-up")
    assert advice is not None and not advice["decides"] and advice["figure"] < 1
    assert any("no difference was shown" in n for n in verdict["notices"])


def test_a_tie_that_look_up_takes_is_said_beside_a_go() -> None:
    """The headline is about the draft, the ranking marks look-up: a reader must not be left to wonder."""
    gains = [1.5, 1.9, 1.4, 2.0, 1.6, 1.8, 1.3, 1.7]
    choice, verdict = judge(arms({"d": gains, "lookup": gains}), sizes={"d": 10})
    tied = "The two are tied, and the rule for ties takes look-up: the ranking marks it as chosen."
    assert verdict["go"] and choice["arm"] == choice["lookup"]["arm"] and tied in verdict["notices"]
    ahead, said = judge(arms({"d": [2.0] * 8, "lookup": [1.2] * 8}), sizes={})
    assert ahead["arm"] != ahead["lookup"]["arm"] and tied not in said["notices"]


def test_a_draft_surely_ahead_of_look_up_says_so() -> None:
    choice, verdict = judge(arms({"d": [2.0] * 10, "lookup": [1.2] * 10}), sizes={})
    assert not choice["lookup"]["level"] and "look-up" not in verdict["headline"]
    assert choice["lookup"]["value"] == pytest.approx(2.0 / 1.2)
    assert any("more than chance" in n for n in verdict["notices"])


def test_of_few_requests_no_difference_is_more_than_chance() -> None:
    _, verdict = judge(arms({"d": [2.0] * 9, "lookup": [1.2] * 9}), sizes={})
    said = " ".join(verdict["notices"])
    assert "measure 10 requests or more" in said and "too few requests to tell it from chance" in said
    assert "more than chance" not in said
    _, enough = judge(arms({"d": [2.0] * 10}), sizes={})
    assert "10 requests or more" not in " ".join(enough["notices"])


def test_the_verdict_names_the_requests_that_it_rests_on() -> None:
    _, verdict = judge(make_run(num=8), make_plan(), domain="code")
    assert verdict["num_requests"] == 8 and "8 requests)" in verdict["headline"]
    assert verdict["notices"][0] == (
        "The verdict rests on 8 requests of code; 24 were measured in all domains together."
    )
    _, pooled = judge(make_run(num=8), make_plan(), domain="mixed")
    assert pooled["notices"][0] == "The verdict rests on 24 requests."
    assert "10 requests or more" in verdict["notices"][1] and "10 or more" not in " ".join(pooled["notices"])


def test_without_look_up_that_is_said() -> None:
    _, verdict = judge(arms({"d": [2.0] * 8}), sizes={})
    assert verdict["notices"][-1] == "Prompt look-up, the free control, was not measured."


def test_regret_against_the_whole_grid_counts_arms_that_a_race_dropped() -> None:
    rows = [r for r in arms({"A": [1.5] * 12, "B": [2.0] * 12}) if r.draft != "B" or int(r.request_id) < 5]
    choice, _ = judge(rows, sizes={}, min_requests=5)
    assert choice["draft"] == "A" and choice["grid_regret"] == pytest.approx(1 - 1.5 / 2.0)
    best, _ = judge(arms({"A": [1.5] * 12, "B": [2.0] * 12}), sizes={})
    assert best["grid_regret"] == 0.0


def test_every_remedy_of_the_draft_share_has_its_own_gain() -> None:
    used = Settings(bootstrap=200, domain="code")
    rows = make_run(num=8, ks=(1, 2, 3), drafts=(replace(LARGE, t_ms=9.0),), lookup=False, noise=0.0)
    cells = build_cells(measured(rows), None, used)
    size = {"read_params": 1000, "head_rows": 40, "hidden_size": 10}  # the head is two fifths
    verdict = decide(cells, choose(cells, used, {}), used, sizes={"code-18pct": size})
    share = reason(verdict, "draft share")
    assert share is not None
    gains = {r["remedy"].split(" (")[0]: r["predicted_gain"] for r in share["remedies"]}
    assert set(gains) == {"half the layers", "half the head", "half the draft time in any way", "a tree"}
    assert 0 < gains["half the head"] < gains["half the layers"] < gains["half the draft time in any way"]
    ordered = [r["predicted_gain"] for r in share["remedies"]]
    assert ordered == sorted(ordered, reverse=True) and share["predicted_gain"] == ordered[0]


def test_a_huge_batch_is_a_no_go_with_verify_named() -> None:
    """At batch 64 a pass over k + 1 tokens is compute: the ceiling itself is under what the recipe asks for."""
    rows = make_grid(num=8, contexts={"short": 250}, batches=(64,), domains=("code",), wide=30.0)
    used = Settings(bootstrap=200, domain="code")
    cells = build_cells(rows, None, used)
    verdict = decide(cells, choose(cells, used, {}), used)
    assert verdict["status"] == "no-go" and verdict["headline"].startswith("Serve without speculation.")
    assert verdict["tallest"]["phase"] == "verify"
    ceiling = reason(verdict, "ceiling of a perfect, free draft")
    assert ceiling is not None and ceiling["figure"] < 1.05 and ceiling["bar"] == "verify"
    deciding = reason(verdict, "end-to-end speedup")
    assert deciding is not None and deciding["predicted_gain"] == pytest.approx(1 / deciding["figure"] - 1)


def test_half_the_targets_depth_is_a_no_go_with_the_draft_named() -> None:
    rows = make_grid(num=8, contexts={"short": 250}, batches=(1,), domains=("code",), drafts={"half": 8.0})
    used = Settings(bootstrap=200, domain="code")
    cells = build_cells(rows, None, used)
    verdict = decide(cells, choose(cells, used, {}), used)
    assert verdict["status"] == "no-go"
    share, step = reason(verdict, "draft share"), reason(verdict, "a draft token's time")
    assert share is not None and share["predicted_gain"] > 0.1 and step is not None and step["figure"] > 0.4


READS = "share of time in which the draft reads its own prefix KV"


def test_prefix_kv_inside_verify_is_not_mended_by_a_window() -> None:
    """The draft's window leaves the target's passes as they are."""
    rows = make_grid(num=8, batches=(1,), domains=("code",), ks=(1, 2))
    made = build_report(rows, None, {}, {"domain": "code", "bootstrap": 100})
    rise = reason(made["verdict"], "prefix KV share, longest context less shortest")
    assert rise is not None and rise["figure"] > 0.10
    gains = {r["remedy"]: r["predicted_gain"] for r in rise["remedies"]}
    assert set(gains) == {"a smaller k, or none", "switch speculation off at this load"}
    assert gains["a smaller k, or none"] is not None
    assert reason(made["verdict"], READS) is None  # a few hundredths of the time


def test_a_draft_that_reads_a_long_prefix_is_offered_a_window_once() -> None:
    rows = make_grid(
        num=8, batches=(1,), domains=("code",), ks=(1, 2), drafts={"slow": 4.0}, contexts={"short": 4000, "long": 16000}
    )
    made = build_report(rows, None, {}, {"domain": "code", "bootstrap": 100})
    reads = reason(made["verdict"], READS)
    assert reads is not None and reads["figure"] > 0.10 and reads["bar"] == "draft"
    assert reads["remedy"] == "window the draft's cache" and reads["predicted_gain"] > 0
    windowed = [replace(r, arm=f"{r.arm}+recent256", recent=256) if r.k else r for r in rows]
    again = build_report(windowed, None, {}, {"domain": "code", "bootstrap": 100})
    assert again["verdict"]["arm"].endswith("+recent256")
    assert not any("window" in m["remedy"] for r in again["verdict"]["reasons"] for m in r["remedies"])


def test_throughput_at_a_batch_is_judged_at_that_batch() -> None:
    rows = make_grid(num=8, contexts={"short": 250}, batches=(1, 16), domains=("code",), drafts={"small": 1.0})
    rows = [
        replace(r, set=int(r.request_id[-1]) // 2, steady_tok=r.new_tok, steady_ms=r.e2e_ms / 16) if r.batch > 1 else r
        for r in rows
    ]
    used = Settings(objective="throughput@16", bootstrap=200, domain="code")
    cells = build_cells(rows, None, used)
    choice = choose(cells, used, {})
    verdict = decide(cells, choice, used)
    wide = {c["arm"]: c["throughput_speedup"] for c in cells if c["batch"] == 16 and c["k"]}
    assert choice["value"] == pytest.approx(max(wide.values())) and choice["arm"] == max(wide, key=lambda a: wide[a])
    assert choice["grid_regret"] == 0.0 and choice["regret"] is None
    assert "tokens a second at batch 16" in verdict["headline"] and verdict["go"] == (choice["value"] >= 1.05)
    made = build_report(rows, None, {}, {"objective": "throughput@16", "bootstrap": 100, "domain": "code"})
    assert made["verdict"]["arm"] == choice["ranking"][0]["arm"]
