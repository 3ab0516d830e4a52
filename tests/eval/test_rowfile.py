"""Files of rows: what is written is read back, and a damaged line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.records import Cycle, RequestRow, RowError
from eval.rowfile import append_rows, read_rows
from tests.eval.rows import make_row, make_run, plain, timed


def test_file_round_trip_with_any_text(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [
        make_row([(3, 1, 2), (3, 3, 2, True)], request_id='a\n"b" <é> 😀\u2028', finish="eos"),
        make_row([(3, 1, 2)], **timed(make_row([(3, 1, 2)]), 1.0, 2.0, 3.0, 4.0)),
        plain(4),
        make_row(error="died", new_tok=0),
    ]
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert read_rows(path) == rows
    assert isinstance(read_rows(path)[0].cycles[0], Cycle)
    assert json.loads(path.read_text().split("\n")[0])["format"] == 2


def test_a_killed_run_loses_only_its_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "requests.jsonl"
    append_rows(path, [plain(3), plain(4)])
    path.write_text(path.read_text()[:-20])
    assert read_rows(path) == [plain(3)]
    assert "half-written" in caplog.text
    append_rows(path, [plain(5)])
    assert read_rows(path) == [plain(3), plain(5)]


def test_bad_files_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    append_rows(path, [plain(3)])
    good = path.read_text()
    cases = {
        "": "no whole line",
        good.replace('"format": 2', '"format": 9'): "line 1: format is 9",
        good + "{not json}\n": "line 3: not JSON",
        good + "[1]\n": "line 3: a list",
        good.replace('"seed": 0', '"sead": 0'): r"line 2: unknown fields \['sead'\], missing \['seed'\]",
        good.replace('"k": 0', '"k": "0"'): "line 2: .*k is '0'",
        good.replace("[0, 0, 1, false]", "[0, 0]", 1): "line 2",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(RowError, match=message):
            read_rows(path)


def test_the_made_up_run_is_a_valid_run(tmp_path: Path) -> None:
    rows = make_run(num=2, ks=(1, 3))
    append_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert all(isinstance(r, RequestRow) for r in rows)
