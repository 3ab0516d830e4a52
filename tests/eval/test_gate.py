"""What a report lets through: the cell that is shipped, told by its fields, judged by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distill.runs import RunError
from eval.gate import (
    GateFailed,
    NoMeasurement,
    arms_of,
    check_gate,
    chosen_cell,
    find_run,
    policy_by_batch,
    policy_by_domain,
    read_report,
    summary,
    verdict_on,
)
from eval.records import RequestRow
from eval.report import build_report
from tests.eval.rows import SMALL, make_run

NAME = "code-5pct"


def rows_of(**change: Any) -> list[RequestRow]:
    return make_run(num=6, ks=(1, 2, 3), drafts=(SMALL,), lookup=False, **change)


def report_of(rows: list[RequestRow], **change: Any) -> dict[str, Any]:
    entry = {"name": NAME, "stored_params": 900, "read_params": 600}
    return build_report(rows, None, {}, {"domain": "code", "bootstrap": 200, "drafts": [entry], **change})


def test_only_a_finished_run_is_found(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no recipe\.json"):
        find_run(tmp_path)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(RunError, match=r"no draft/draft\.json"):
        find_run(tmp_path)


def test_a_chain_of_the_block_rule_is_found_and_shown() -> None:
    block = [replace(r, arm=f"{r.arm}+block", rule="block") if r.k else r for r in rows_of()]
    report = report_of(block)
    cell = chosen_cell(report, NAME)
    assert cell["arm"] == report["verdict"]["arm"] and cell["rule"] == "block"
    assert {c["k"] for c in arms_of(report, cell)} == {1, 2, 3}
    assert set(policy_by_domain(report, cell)) >= {"code", "math", "qa"} and policy_by_batch(report, cell) == {
        1: cell["k"]
    }
    assert report["model"]["what_if"] and report["model"]["held_out"]["points"]


def test_arms_of_other_settings_are_not_mixed_in() -> None:
    rows = rows_of()
    warm = [
        replace(r, arm=f"{r.arm}+t0.7", draft_temperature=0.7, wall_ms=3 * r.wall_ms, phases_ms=None, clock="bare")
        for r in rows
        if r.k and r.clock == "bare" and r.error is None
    ]
    report = report_of(rows + warm)
    cell = chosen_cell(report, NAME)
    assert cell["draft_temperature"] is None
    assert all(c["draft_temperature"] is None for c in arms_of(report, cell))


def test_without_an_arm_that_servers_run_the_true_reason_is_given() -> None:
    adaptive = [
        replace(r, arm=f"draft:{NAME}@adaptive3", policy="adaptive") if r.k else r for r in rows_of() if r.k in (0, 3)
    ]
    with pytest.raises(NoMeasurement, match=r"adaptive3.* servers can not run; measure a fixed k"):
        chosen_cell(report_of(adaptive), NAME)
    with pytest.raises(NoMeasurement, match="too few requests"):
        chosen_cell(report_of(rows_of(), min_requests=50), NAME)


@pytest.mark.parametrize(("text", "told"), [("[1]", "a list, no report"), ("{", "not JSON"), ("{}", "format None")])
def test_what_is_no_report_is_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(NoMeasurement, match=told):
        read_report(tmp_path / "report.json")


def test_the_gate_is_about_what_is_shipped() -> None:
    """An adaptive arm pays and the fixed k that a server would run does not: no go."""
    rows = rows_of()
    fast = [
        replace(r, arm=f"draft:{NAME}@adaptive3", policy="adaptive", label="adaptive<=3")
        for r in rows
        if r.k == 3 and r.error is None
    ]
    slow = [
        replace(r, wall_ms=4 * r.wall_ms, phases_ms=r.phases_ms and {n: 4 * v for n, v in r.phases_ms.items()})
        if r.k
        else r
        for r in rows
    ]
    report = report_of(slow + fast)
    assert report["verdict"]["go"] and report["verdict"]["arm"] == f"draft:{NAME}@adaptive3"
    cell = chosen_cell(report, NAME)
    verdict = verdict_on(report, cell)
    assert cell["chain"] and verdict["arm"] == cell["arm"] and verdict["status"] == "no-go"
    with pytest.raises(GateFailed, match=r"verdict no-go: Serve without speculation.*wanted >= 1.05x"):
        check_gate(report, NAME)
    assert summary({**report, "provenance": {}}, cell)["verdict"] == "no-go"
    # Where the fixed k pays too, its own figures are what the gate goes by.
    both = report_of(rows + fast)
    assert verdict_on(both, chosen_cell(both, NAME))["go"]
    check_gate(both, NAME)
    with pytest.raises(GateFailed, match="verdict insufficient"):
        check_gate(report_of(rows, min_requests=50), NAME)


def test_a_read_report_gives_the_same_verdict_on_the_shipped_arm() -> None:
    rows = rows_of()
    fast = [
        replace(
            r, arm=f"draft:{NAME}@adaptive3", policy="adaptive", wall_ms=r.wall_ms / 2, phases_ms=None, clock="bare"
        )
        for r in rows
        if r.k == 3 and r.error is None and r.clock == "bare"
    ]
    report = report_of(rows + fast)
    assert report["verdict"]["arm"] == f"draft:{NAME}@adaptive3"
    again = json.loads(json.dumps(report))
    one, two = (verdict_on(r, chosen_cell(r, NAME)) for r in (report, again))
    assert one["headline"] == two["headline"] and one["go"]
    alone = report_of(rows)
    assert one["headline"] == alone["verdict"]["headline"]
