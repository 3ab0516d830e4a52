"""The rounds of an evaluation say how far they are."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from distill.recipe import load_recipe
from engine.model import Runner
from eval import rounds
from eval.measure import Bench, Load
from eval.resume import PROGRESS, ROWS, Progress, Stopped
from eval.rowfile import read_rows
from tests.engine.test_speculate import DRAFTS, TARGET
from tests.eval.test_measure import ARMS, REQUESTS


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_file_gets_lines_and_a_terminal_a_bar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(rounds, "SAY_EVERY_S", 0.0)
    caplog.set_level(logging.INFO)
    bench = Bench(Runner(TARGET, 1, 120), {"small": Runner(DRAFTS["noise"], 1, 120)}, Load(12, ()))
    recipe = load_recipe("recipes/code.yaml", ["eval.warmup=1"])
    console = Console(file=io.StringIO(), force_terminal=terminal)
    rounds.measure_all(recipe, bench, REQUESTS, ARMS, tmp_path, None, console)
    assert len({row.request_id for row in read_rows(tmp_path / ROWS)}) == len(REQUESTS)
    said = [record.getMessage() for record in caplog.records]
    lines = [f"batch 1, 3 arms: {num} of 5 measured" for num in range(1, 6)]
    assert [text for text in said if text.endswith("measured")] == ([] if terminal else lines)


def test_pauses_before_a_stop_are_kept(tmp_path: Path) -> None:
    bench = Bench(Runner(TARGET, 1, 120), {"small": Runner(DRAFTS["noise"], 1, 120)}, Load(12, ()))
    stopped = Stopped({}, Progress(paused_s=(120.0,), slept_s=(60.0,)), [])
    recipe = load_recipe("recipes/code.yaml", ["eval.warmup=0"])
    console = Console(file=io.StringIO())
    found = rounds.measure_all(recipe, bench, REQUESTS[:1], ARMS, tmp_path, stopped, console)
    assert found["paused"] == {"num": 1, "min": 2.0, "slept": {"num": 1, "min": 1.0}}
    assert json.loads((tmp_path / PROGRESS).read_text())["paused_s"] == [120.0]
    assert json.loads((tmp_path / PROGRESS).read_text())["slept_s"] == [60.0]
