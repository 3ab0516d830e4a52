"""W&B's copies of a report: its tables, every figure, the summary; offline, in a folder beside it."""

from __future__ import annotations

import json
from pathlib import Path

from distill.schema import Track
from eval.copies import CELLS, RANKING, copy_report
from eval.report import build_report, write_report
from tests.distill.test_track import folded, of, records
from tests.eval.rows import make_plan, make_run


def test_tables_figures_and_summary_are_copied(tmp_path: Path) -> None:
    settings = {"domain": "code", "bootstrap": 100}
    report = build_report(make_run(num=6, ks=(1, 3)), make_plan(), {"time": "now"}, settings)
    write_report(tmp_path, report)
    copy_report(Track(), tmp_path, {"settings": {"k": [1, 3]}}, report)
    found = records(tmp_path)
    summary = {}
    for part in of("summary", found):
        summary |= folded(part.update)
    assert summary["status"] == report["verdict"]["status"] and summary["arm"] == report["choice"]["arm"]
    assert summary["num_requests"] == 6 and summary["simulated"] is False
    keys = {key.split("/")[0] for record in of("history", found) for key in folded(record.item)}
    assert {"ranking", "cells"} <= keys
    assert {path.stem for path in (tmp_path / "figures").glob("*.svg")} <= keys
    (ranking,) = tmp_path.glob("wandb/offline-run-*/files/media/table/ranking*.json")
    table = json.loads(ranking.read_text())
    assert table["columns"] == list(RANKING) and len(table["data"]) == len(report["choice"]["ranking"])
    (cells,) = tmp_path.glob("wandb/offline-run-*/files/media/table/cells*.json")
    assert json.loads(cells.read_text())["columns"][: len(CELLS)] == list(CELLS)


def test_disabled_copies_nothing(tmp_path: Path) -> None:
    report = build_report(make_run(num=6, ks=(1,)), make_plan(), {}, {"domain": "code", "bootstrap": 100})
    copy_report(Track(mode="disabled"), tmp_path, {}, report)
    assert not list(tmp_path.iterdir())
