"""Simulated acceptance, from the bench to the report: marked everywhere, checked by the model, released never."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distill.schema_eval import Eval
from engine.costs import Costs, predicted_speedup, tau_by_position
from engine.model import Runner
from eval.against import read_earlier
from eval.arms import Arm, grid
from eval.decoders import EvalRequest, Load
from eval.gate import NoMeasurement, find_report, read_report
from eval.measure import Bench
from eval.records import LOOKUP, RequestRow, RowError
from eval.report import build_report, terminal_table, write_report
from eval.simulated import check_table, rates_of
from scripts.readme_report import read_report as readme_of
from tests.engine.test_speculate import DRAFTS, TARGET
from tests.eval.rows import make_row, plain
from tests.eval.test_slowdown import STEP_MS, Scripted

RATES = (0.9, 0.6)
# What the scripted clock gives to every cycle, whatever its k.
COSTS = Costs(
    STEP_MS["verify"] + STEP_MS["sampling"] + STEP_MS["host"], {k: STEP_MS["verify"] for k in range(4)}, 0.0,
    STEP_MS["draft"], STEP_MS["sampling"], STEP_MS["host"], 16, 1, "cpu", "small",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[RequestRow]:
    bench = Bench(Runner(TARGET, 1, 220), {"small": Runner(DRAFTS["noise"], 1, 220)}, Load(100, ()))
    bench._clocks = {"bare": Scripted(STEP_MS, True), "phased": Scripted(STEP_MS, False)}
    requests = [EvalRequest(f"r{i}", "code", "short", tuple(range(3 + i, 12 + 2 * i))) for i in range(6)]
    arms = [Arm("", 0), *(Arm("small", k, simulated=RATES) for k in (2, 3))]
    return list(bench.measure(requests, arms, 0, 1))


@pytest.fixture(scope="module")
def report(rows: list[RequestRow]) -> dict[str, Any]:
    settings = {"domain": "code", "bootstrap": 100, "drafts": [{"name": "small"}]}
    return build_report(rows, {"costs": [COSTS.to_json()]}, {"time": "now"}, settings)


def test_predicted_and_simulated_speedup_agree_where_costs_are_known(report: dict[str, Any]) -> None:
    found = report["simulated"]
    assert found["accept"] == list(RATES) and [c["k"] for c in found["cells"]] == [2, 3]
    for cell in found["cells"]:
        rates = (0.9, 0.6, 0.6)[: cell["k"]]
        assert cell["expected_tau"] == pytest.approx(tau_by_position(rates))
        # Prefills run on the real clock: they are those that were measured.
        request = next(c["request"] for c in report["cells"] if c["arm"] == cell["arm"])
        assert cell["predicted"] == pytest.approx(predicted_speedup(COSTS, cell["k"], rates, **request))
        assert abs(cell["error_frac"]) < 0.06
    assert found["mean_abs_error_frac"] < 0.05 == found["bar_frac"]
    assert "2.44" in str([list(c.cells) for c in check_table(found).columns])


def test_rows_arms_and_report_say_that_it_is_simulated(
    rows: list[RequestRow], report: dict[str, Any], tmp_path: Path
) -> None:
    assert {r.simulated for r in rows if r.k} == {RATES} and all(not r.simulated for r in rows if not r.k)
    assert {r.arm for r in rows if r.k} == {f"draft:small@k{k}+simulated0.9-0.6" for k in (2, 3)}
    assert report["verdict"]["status"] == "simulated" and not report["verdict"]["go"]
    write_report(tmp_path, report)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "SIMULATED" in text and "not a measurement of a draft" in text and "SIMULATED acceptance 0.9" in text
    assert "SIMULATED" in str(terminal_table(report).title)
    # Other text than the baseline's is what was asked for, no bug.
    assert all(c["same_text_frac"] is None for c in report["cells"])


def test_no_release_readme_or_comparison_takes_it(report: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "20260101-000000-simulated"
    write_report(folder, report)
    with pytest.raises(NoMeasurement, match=r"holds no report\.json"):
        find_report(tmp_path)
    with pytest.raises(NoMeasurement, match="acceptance was simulated"):
        read_report(find_report(tmp_path, folder))
    for read in (read_earlier, readme_of):
        with pytest.raises(ValueError, match="acceptance was simulated"):
            read(folder / "report.json")


def test_real_and_simulated_rows_are_not_put_together() -> None:
    simulated = replace(make_row([(3, 2, 3)]), simulated=RATES)
    assert rates_of([simulated, plain(3)]) == RATES and rates_of([plain(3)]) == ()
    with pytest.raises(ValueError, match=r"\(real; 0.9, 0.6\): a report is of one"):
        rates_of([simulated, make_row([(3, 2, 3)])])


def test_rows_check_their_rates() -> None:
    with pytest.raises(RowError, match=r"every rate must lie in 0\.\.1"):
        replace(make_row([(3, 2, 3)]), simulated=(1.5,))
    with pytest.raises(RowError, match="the baseline accepts nothing"):
        replace(plain(3), simulated=RATES)
    assert json.loads(json.dumps({"a": replace(make_row([(3, 2, 3)]), simulated=RATES).simulated})) == {"a": [0.9, 0.6]}


def test_the_grid_has_drafts_alone() -> None:
    arms = grid(Eval(k=(1, 3), policies=("fixed", "adaptive"), simulate=RATES), ["a"])
    assert [arm.simulated for arm in arms] == [(), RATES, RATES, RATES]
    assert LOOKUP not in {arm.draft for arm in arms} and arms[1].label == "a k=1, SIMULATED acceptance 0.9, 0.6"
