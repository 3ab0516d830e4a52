"""Acceptance by draft and domain: rows worked by hand, what is compared, and a report over tiny models."""

from __future__ import annotations

import csv
import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from distill.checkpoint import write_draft
from distill.models import model_hash
from eval.bootstrap import paired_difference_interval
from eval.canvas import styled
from eval.cells import Settings
from eval.matrix import acceptance_matrix, draw_matrix, lost_words, matrix_table
from eval.records import RequestRow
from eval.report import build_report, write_report
from eval.run import main
from eval.verdict import worst_gap
from tests.conftest import make_noisy, make_target, make_tokenizer
from tests.distill.test_train import write_world
from tests.eval.rows import make_plan, make_row, make_run
from tests.eval.test_report import PROVENANCE, settings

SETTINGS = Settings(min_requests=3, bootstrap=400, domain="code")
DRAFTS = [{"name": "a", "trained_on": {"domain": "code"}}, {"name": "b", "trained_on": {"domain": "qa"}}]


def rows_of(draft: str, domain: str, accepted: list[int], k: int = 4, **change: Any) -> list[RequestRow]:
    """A request for each entry: ten cycles, so many of 40 proposals accepted, as evenly as it goes."""
    made = []
    for i, num in enumerate(accepted):
        each = [num * (j + 1) // 10 - num * j // 10 for j in range(10)]
        cycles = [(k, a, a + 1) for a in each]
        made.append(
            make_row(cycles, draft=draft, domain=domain, request_id=f"{domain}{i}", k=k, finish="eos", **change)
        )
    return made


# a: 60 of 120 on code, 30 of 120 on qa; b: 54 of 120 on code (ahead in one request), 54 on qa (ahead in each).
A = rows_of("a", "code", [20, 20, 20]) + rows_of("a", "qa", [10, 10, 10])
B = rows_of("b", "code", [24, 15, 15]) + rows_of("b", "qa", [20, 18, 16])


def cells(found: dict[str, Any] | None) -> dict[tuple[str, str], dict[str, Any]]:
    assert found is not None
    return {(c["draft"], c["domain"]): c for c in found["cells"]}


def test_figures_worked_by_hand() -> None:
    found = acceptance_matrix(A + B, SETTINGS, 1, DRAFTS, "draft:a@k4", "draft:a@k4")
    assert found is not None and found["domains"] == ["code", "qa"]
    assert found["drafts"] == [{"name": "a", "trained_on": "code"}, {"name": "b", "trained_on": "qa"}]
    assert (found["k"], found["which"]) == (4, "the chosen arm's")
    by = cells(found)
    assert {key: (c["alpha"], c["best"]) for key, c in by.items()} == {
        ("a", "code"): (0.5, True), ("b", "code"): (0.45, False), ("a", "qa"): (0.25, False), ("b", "qa"): (0.45, True),
    }  # fmt: skip
    code, qa = by["b", "code"], by["a", "qa"]
    # Of b on code: 24/40 once, 15/40 twice; by request it lies 4 ahead or 5 behind, so the resamples hold 0.
    assert code["lost"] == pytest.approx(0.05) and (code["low"], code["high"]) == pytest.approx((0.375, 0.6))
    assert (code["lost_low"], code["lost_high"]) == pytest.approx((-0.1, 0.125)) and code["level"]
    # Of a on qa every request lies 6 to 10 of 40 behind: 0.15 to 0.25, whatever is drawn.
    assert qa["lost"] == pytest.approx(0.2) and (qa["lost_low"], qa["lost_high"]) == pytest.approx((0.15, 0.25))
    assert (qa["low"], qa["high"]) == (0.25, 0.25) and not qa["level"]
    assert [lost_words(c) for c in (by["a", "code"], code, qa)] == [
        "best", "level: 5.0 points less (-10.0 to 12.5)", "20.0 points less (15.0 to 25.0)",
    ]  # fmt: skip
    assert found["sentence"] == (
        "One draft for all domains, a, costs acceptance: 20.0 points on qa (15.0 to 25.0, against b). Per-domain "
        "drafts, the best of each column, accept 0.47 on the mean of the domains, a 0.38."
    )


def test_the_domain_gap_is_the_rules_own_figure() -> None:
    found = acceptance_matrix(A + B, SETTINGS, 1, DRAFTS, "draft:a@k4", None, ("qa", 0.25))
    assert found is not None and found["which"] == "the judged arm's"
    assert found["sentence"].endswith(
        "On qa its acceptance lies 25.0 points under that on its own domain, and the rule's remedy, a draft for each "
        "domain, counts on all of them: the best of these drafts there wins back 20.0."
    )
    told = acceptance_matrix(A + B, SETTINGS, 1, DRAFTS, "draft:b@k4", None, ("code", 0.2))
    assert (
        told is not None and "One draft for all domains, b: no other draft that was measured surely" in told["sentence"]
    )
    assert "No difference to the best was shown on code." in told["sentence"]
    assert told["sentence"].endswith("the best of these drafts there wins back 5.0, which may be chance.")
    # At another k than the judged arm's the rule's figure is of another acceptance: it is left out.
    other = [*rows_of("a", "code", [9] * 3, k=2), *rows_of("a", "qa", [9] * 3, k=2)]
    apart = acceptance_matrix([*A, *B, *other], SETTINGS, 1, DRAFTS, "draft:a@k2", None, ("qa", 0.25))
    assert apart is not None and (apart["k"], apart["which"]) == (4, "the smallest that all drafts share")
    assert "rule's remedy" not in apart["sentence"]


def test_one_draft_that_is_best_everywhere_needs_no_others() -> None:
    better = rows_of("b", "code", [30] * 3) + rows_of("b", "qa", [30] * 3)
    found = acceptance_matrix(A + better, SETTINGS, 1, (), "draft:a@k4", "baseline")
    assert found is not None and found["sentence"].endswith(
        "The best of every domain is one draft, b: none needs one of its own."
    )
    assert found["drafts"][0] == {"name": "a", "trained_on": None}


def test_the_smallest_common_k_where_the_judged_arm_is_not_shared() -> None:
    more = [row for d in "ab" for domain in ("code", "qa") for row in rows_of(d, domain, [9, 8, 9], k=2)]
    rows = [*A, *B, *more, *rows_of("a", "code", [5] * 3, k=1), *rows_of("a", "qa", [5] * 3, k=1)]
    adaptive = rows_of("a", "code", [30] * 3, arm="draft:a@adaptive4", policy="adaptive")
    for judged in ("draft:a@k1", "draft:a@adaptive4", "lookup@k4"):
        found = acceptance_matrix([*rows, *adaptive], SETTINGS, 1, DRAFTS, judged, judged)
        assert found is not None and (found["k"], found["which"]) == (2, "the smallest that all drafts share")


def test_only_requests_that_all_drafts_answered_count() -> None:
    more = rows_of("a", "code", [20, 20, 20, 40])  # a request that b did not answer
    by = cells(acceptance_matrix(more + A[3:] + B, SETTINGS, 1, DRAFTS))
    assert by["a", "code"]["alpha"] == 0.5 and by["a", "code"]["num_requests"] == 3
    third = [*rows_of("a", "math", [9, 9]), *rows_of("b", "math", [9, 9])]
    by = cells(acceptance_matrix(A + B + third, SETTINGS, 1, DRAFTS))
    assert by["a", "math"]["alpha"] is None and lost_words(by["a", "math"]) == "2 shared"


def test_repeats_that_went_the_same_way_count_once() -> None:
    again = [make_row(r.cycles, **{"draft": r.draft, "domain": r.domain, "request_id": r.request_id, "k": 4,
                                   "finish": "eos", "clock": "bare", "repeat": 1}) for r in A[:1]]  # fmt: skip
    assert acceptance_matrix(A + again + B, SETTINGS, 1, DRAFTS) == acceptance_matrix(A + B, SETTINGS, 1, DRAFTS)


def test_nothing_to_compare() -> None:
    assert acceptance_matrix(A, SETTINGS, 1) is None
    assert acceptance_matrix(A[:3] + B[:3], SETTINGS, 1) is None
    lookup = rows_of("lookup", "code", [9] * 3) + rows_of("lookup", "qa", [9] * 3)
    assert acceptance_matrix(A + lookup, SETTINGS, 1) is None
    short = rows_of("b", "code", [9] * 3, k=3) + rows_of("b", "qa", [9] * 3, k=3)
    for other, need in ((short, 3), (B, 4)):
        found = acceptance_matrix(A + other, Settings(min_requests=need), 1)
        assert found == {
            "why_not": f"the drafts have no chain of equal k with which all of them answered {need} requests in two "
            "domains"
        }


def test_drafts_of_which_nothing_is_accepted_can_be_drawn() -> None:
    zero = [row for d in "ab" for domain in ("code", "qa") for row in rows_of(d, domain, [0, 0, 0])]
    cut = [make_row([(4, 0, 1, True)], draft=d, domain="qa", request_id="cut", k=4, finish="eos") for d in "ab"]
    found = acceptance_matrix(zero + cut, SETTINGS, 1, DRAFTS)
    assert [(c["alpha"], c["best"], c["num_requests"]) for c in cells(found).values()] == [(0.0, True, 3)] * 4
    with styled():
        figure = draw_matrix({"matrix": found})
    assert figure is not None and figure.svg.count(">0.00<") == 4


def test_the_paired_interval_is_narrower_than_two_apart() -> None:
    one, other = ([20.0, 4.0, 36.0, 12.0], [40.0] * 4), ([18.0, 2.0, 34.0, 10.0], [40.0] * 4)
    assert paired_difference_interval(one, other, 500, 0) == pytest.approx((0.05, 0.05))
    assert paired_difference_interval(([1.0], [2.0]), ([1.0], [2.0]), 500, 0) is None
    assert paired_difference_interval(([1.0, 0.0], [0.0, 0.0]), one, 5, 0) is None


def test_every_form_of_the_report_says_the_same(tmp_path: Path) -> None:
    drafts = [{"name": "code-5pct", "trained_on": {"domain": "code"}}, {"name": "code-18pct"}]
    report = build_report(make_run(num=8), make_plan(), PROVENANCE, settings(drafts=drafts))
    write_report(tmp_path, report)
    found = report["matrix"]
    judged = next(c for c in report["cells"] if c["arm"] == report["verdict"]["arm"] and c["domain"] == "code")
    assert (found["k"], found["which"]) == (judged["k"], "the judged arm's") and report["choice"]["draft"] == "lookup"
    arms = {d: next(c["arm"] for c in report["cells"] if c["draft"] == d and c["k"] == found["k"]) for d in
            ("code-5pct", "code-18pct")}  # fmt: skip
    for c in found["cells"]:  # nothing is measured, or counted, twice
        one = next(x for x in report["cells"] if x["arm"] == arms[c["draft"]] and x["domain"] == c["domain"])
        assert c["alpha"] == pytest.approx(one["alpha"])
    gap = worst_gap(report["verdict"], report["cells"], judged)
    assert (
        gap is not None
        and gap[0] == "qa"
        and gap[1] == next(r["figure"] for r in report["verdict"]["reasons"] if r["rule"].startswith("acceptance lost"))
    )
    assert f"lies {100 * gap[1]:.1f} points under" in found["sentence"]
    text, page = (tmp_path / "report.md").read_text(), unescape((tmp_path / "report.html").read_text())
    assert found["sentence"] in text and found["sentence"] in page
    for line in matrix_table(report):
        for c in line["cells"]:
            assert f"{c['alpha']:.2f} ({c['low']:.2f} to {c['high']:.2f}), {lost_words(c)}" in text
    with (tmp_path / "figures" / "matrix.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(r["draft"], r["domain"], float(r["alpha"])) for r in table] == [
        (c["draft"], c["domain"], c["alpha"]) for c in found["cells"]
    ]
    drawn = (tmp_path / "figures" / "matrix.svg").read_text()
    assert all(f"{c['alpha']:.2f}" in drawn for c in found["cells"]) and "<image" not in drawn
    assert json.loads((tmp_path / "report.json").read_text())["matrix"] == found
    old = {key: value for key, value in report.items() if key != "matrix"}  # written before there was a matrix
    write_report(tmp_path / "old", old)
    assert "Acceptance by draft and domain" not in (tmp_path / "old" / "report.html").read_text()


def test_two_drafts_and_two_domains_of_tiny_models(tmp_path: Path) -> None:
    world = write_world(tmp_path)
    words = [" ".join(f"w{i}{j}" for j in range(4)) for i in range(3)]
    held_out = [{"prompt": f"{d} {text}", "domain": d, "id": f"{d}{i}"} for d in ("code", "qa")
                for i, text in enumerate(words)]  # fmt: skip
    (world / "held.jsonl").write_text("\n".join(json.dumps(row) for row in held_out))
    folders = []
    for name, scale, domain in (("near", 0.02, "code"), ("far", 0.5, "qa")):
        meta = {"target": {"sha256": model_hash(world / "target")}, "traffic": {"domain": domain}}
        folders += ["--draft", str(world / name)]
        write_draft(
            world / name, make_noisy(make_target(), scale), make_tokenizer(), meta, dtype="float32", eos_ids=(1, 4)
        )
    assert (
        main(
            [
                str(world / "recipe.yaml"), f"traffic.heldout={world}/held.jsonl", "eval.num_requests=3",
                "eval.min_requests=3", "eval.max_new_tok=12", "eval.k=[2]", "eval.domains=[code, qa]",
                "eval.batches=[1]", "track.mode=disabled", *folders, "--out", str(tmp_path / "out"),
            ]
        )
        == 0
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = report["matrix"]
    assert found["drafts"] == [{"name": "near", "trained_on": "code"}, {"name": "far", "trained_on": "qa"}]
    assert (found["k"], found["domains"]) == (2, ["code", "qa"]) and len(found["cells"]) == 4
    by = cells(found)
    for domain in found["domains"]:
        assert by["near", domain]["alpha"] > by["far", domain]["alpha"] and by["near", domain]["best"]
    assert (tmp_path / "out" / "figures" / "matrix.svg").is_file()
