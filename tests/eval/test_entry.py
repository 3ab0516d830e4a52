"""Tables that go to a file or a pipe."""

from __future__ import annotations

import pytest
from rich.table import Table

from eval.entry import table_console


def test_a_table_in_a_pipe_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [f"column {n} 12.34" for n in range(12)]
    table = Table(*cells)
    table.add_row(*cells)
    table_console().print(table)
    said = capsys.readouterr().out
    assert "…" not in said
    assert all(said.count(cell) == 2 for cell in cells)
