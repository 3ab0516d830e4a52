"""Prompts to ask: by length, as they were added, without the settled ones; their file needs room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distill.worklist import Worklist
from tests.distill.test_sample import prompt

ROOT = Path(__file__).parents[2]


def test_the_shortest_come_first_and_settled_ones_never() -> None:
    work = Worklist()
    lengths = [3, 1, 2, 1, 3]
    for number, length in enumerate(lengths):
        work.add(prompt("x", f"p{number}"), [7, 2**40, 0][:length], number / 7)
    assert [one[0].id for one in work] == ["p1", "p3", "p2", "p0", "p4"]
    assert len(work) == 5 and work.longest == 3
    work.settle("p3")
    work.settle("p0")
    work.settle("nobody")
    ids = [7, 2**40, 0]
    assert list(work) == [
        (prompt("x", f"p{number}"), ids[:size], number / 7) for size, number in ((1, 1), (2, 2), (3, 4))
    ]


def test_ids_must_differ() -> None:
    work = Worklist()
    work.add(prompt("x", "same"), [1], 0.0)
    with pytest.raises(ValueError, match="two prompts have the id 'same'"):
        work.add(prompt("y", "same"), [1], 0.0)


def test_no_room_for_temporary_files_is_told() -> None:
    """A limit on the size of a file does what a full disk does; the message names what to change."""
    code = (
        "import resource; from distill.spill import Spill\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "spill = Spill('CREATE TABLE a (b BLOB)')\n"
        "try:\n"
        "    for _ in range(100): spill.run('INSERT INTO a VALUES (?)', bytes(2**20))\n"
        "except OSError as error: print(error)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "temporary files can not be written" in done.stdout and "TMPDIR" in done.stdout, done.stderr
