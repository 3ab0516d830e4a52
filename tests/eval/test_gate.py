"""What a report lets through: the cell that is shipped, told by its fields, judged by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eval.gate import NoMeasurement, arms_of, chosen_cell, policy_by_batch, policy_by_domain
from eval.records import RequestRow
from eval.report import build_report
from tests.eval.rows import SMALL, make_run

NAME = "code-5pct"


def rows_of(**change: Any) -> list[RequestRow]:
    return make_run(num=6, ks=(1, 2, 3), drafts=(SMALL,), lookup=False, **change)


def report_of(rows: list[RequestRow], **change: Any) -> dict[str, Any]:
    entry = {"name": NAME, "stored_params": 900, "read_params": 600}
    return build_report(rows, None, {}, {"domain": "code", "bootstrap": 200, "drafts": [entry], **change})


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
    with pytest.raises(NoMeasurement, match="adaptive3.* servers can not run; measure a fixed k"):
        chosen_cell(report_of(adaptive), NAME)
    with pytest.raises(NoMeasurement, match="too few requests"):
        chosen_cell(report_of(rows_of(), min_requests=50), NAME)
