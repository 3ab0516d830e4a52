"""The table of trials is whole and true: every trial has its row, and every test it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_trial_has_a_row_and_every_named_test_exists() -> None:
    text = (ROOT / "docs" / "trials.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (T\d\d) \|", text, re.MULTILINE)
    assert rows == [f"T{number:02d}" for number in range(1, 71)]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 100
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
