"""The same flow as for a million rows, with a few thousand; its memory does not grow with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.data_scale import main


def test_counts_are_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "3000", "--dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    # 150 of 3,000 repeat another one and 60 are held out, of which none is among the 150.
    assert "2790 prompts of 3000 rows, 2790 answers in 11 shards" in said
    assert len(re.findall(r"peak memory \d\.\d\d GiB", said)) == 4
    assert not list(tmp_path.iterdir())
