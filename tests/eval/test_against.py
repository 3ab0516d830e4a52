"""Before and after a change: the bars of two reports, the tallest named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.against import before_after, draw_before_after, read_earlier
from eval.report import build_report, write_report
from tests.eval.grid import make_grid


def report(slow: float, **change: Any) -> dict[str, Any]:
    rows = make_grid(
        contexts={"short": 250}, batches=(1,), domains=("code",), drafts={"small": slow}, ks=(2,), **change
    )
    return build_report(rows, None, {}, {"domain": "code", "bootstrap": 100})


def test_a_cheaper_draft_shortens_its_own_bar() -> None:
    found = before_after(report(8.0), report(1.0))
    assert found["before"]["tallest"] == "draft" and found["after"]["tallest"] == "verify"
    assert found["most_changed"] == "draft" and found["change_ms"]["draft"] < 0
    assert abs(found["change_ms"]["verify"]) < 0.2 * abs(found["change_ms"]["draft"])
    assert found["same_load"] and "The tallest bar was draft" in found["sentence"]
    for side in (found["before"], found["after"]):
        assert sum(side["share"].values()) == pytest.approx(1.0)
        assert sum(side["ms_per_tok"].values()) == pytest.approx(side["decode_ms_per_tok"])


def test_the_change_is_in_every_form_of_the_report(tmp_path: Path) -> None:
    old, new = report(8.0), report(1.0)
    new["against"] = before_after(old, new)
    page = write_report(tmp_path, new).read_text()
    assert "The tallest bar was draft" in page and (tmp_path / "figures" / "before_after.csv").exists()
    assert "## Before and after" in (tmp_path / "report.md").read_text()
    figure = draw_before_after(new)
    assert figure is not None
    assert [(row["when"], row["phase"]) for row in figure.table if row["tallest"]] == [
        ("before", "draft"), ("after", "verify"),
    ]  # fmt: skip


def test_other_loads_are_said() -> None:
    old = report(1.0)
    longer = make_grid(contexts={"long": 8000}, batches=(1,), domains=("code",), ks=(2,))
    found = before_after(old, build_report(longer, None, {}, {"domain": "code", "bootstrap": 100}))
    assert not found["same_load"] and "The loads differ" in found["sentence"]


def test_other_settings_and_another_machine_are_said() -> None:
    """A change of the machine or of the answers' length must not pass for that of the draft."""
    old, new = report(1.0), report(1.0)
    assert "Other settings" not in before_after(old, new)["sentence"]
    assert "Without speculation" not in before_after(old, new)["sentence"]
    old["settings"] |= {"max_new_tok": 24, "dtype": "float32"}
    new["settings"] |= {"max_new_tok": 4, "dtype": "float32"}
    for cell in new["cells"]:
        if not cell["k"]:
            cell["decode_ms_per_tok"] *= 1.2
    said = before_after(old, new)["sentence"]
    assert "Other settings: max_new_tok 24 -> 4." in said and "dtype" not in said
    assert "Without speculation a token took" in said and "machine or load differ" in said
    speed = old["verdict"]["arm"] and next(c for c in old["cells"] if c["arm"] == old["verdict"]["arm"])
    assert f"({speed['latency_speedup']['ci_low']:.2f} to {speed['latency_speedup']['ci_high']:.2f})" in said


def test_an_earlier_report_is_read_from_file_or_folder_and_checked(tmp_path: Path) -> None:
    write_report(tmp_path, report(2.0))
    assert read_earlier(tmp_path)["verdict"]["arm"] == read_earlier(tmp_path / "report.json")["verdict"]["arm"]
    # A report of format 1 had no model; its cells are enough.
    older = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "old.json").write_text(json.dumps({k: v for k, v in older.items() if k != "model"} | {"format": 1}))
    assert read_earlier(tmp_path / "old.json")["format"] == 1
    with pytest.raises(ValueError, match=r"no report\.json can be read"):
        read_earlier(tmp_path / "absent.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no report of an evaluation"):
        read_earlier(tmp_path / "other.json")
    empty = build_report([], None, {}, {})
    (tmp_path / "empty.json").write_text(json.dumps(empty))
    with pytest.raises(ValueError, match="no judged arm with phase shares"):
        read_earlier(tmp_path / "empty.json")
