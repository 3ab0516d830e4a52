"""Rows check themselves, survive the file, and leave the figures in one place each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eval.records import Cycle, RowError, arm_name, counted, errors, measured
from tests.eval.rows import make_row, plain


@pytest.mark.parametrize(
    "module",
    [
        "records",
        "stats",
        "speedup",
        "cells",
        "choice",
        "rules",
        "verdict",
        "report",
        "arms",
        "budget",
        "race",
        "replay",
        "served_view",
        "client",
    ],
)
def test_torch_free(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; import eval.{module}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_arm_names() -> None:
    assert arm_name("", 0) == "baseline"
    assert arm_name("lookup", 4) == "lookup@k4"
    assert arm_name("code", 3) == "draft:code@k3"


def test_e2e_and_tpot() -> None:
    row = make_row([(3, 2, 3)], wall_ms=30.0, prefill_ms=20.0, draft_prefill_ms=5.0)
    assert row.e2e_ms == 55.0
    assert row.tpot_ms == 10.0
    assert plain(1, wall_ms=0.0).tpot_ms is None


def test_measured_drops_warmup_and_errors_only() -> None:
    good, warm = make_row([(3, 1, 2)]), make_row([(3, 1, 2)], warmup=True)
    bad = make_row(error="out of memory", new_tok=0)
    assert measured([good, warm, bad]) == [good]


def test_errors_are_counted_and_named() -> None:
    rows = [make_row(error="too long", new_tok=0, request_id=i, k=k) for i in ("a", "b") for k in (1, 3)]
    rows += [make_row(error="out of memory", new_tok=0, warmup=True), make_row([(3, 1, 2)])]
    assert errors(rows) == [
        {"error": "too long", "num_rows": 4, "requests": ["a", "b"], "arms": ["draft:d@k1", "draft:d@k3"]},
        {"error": "out of memory", "num_rows": 1, "requests": ["r0"], "arms": ["draft:d@k3"]},
    ]


def test_counted_leaves_out_cut_and_shortened_cycles() -> None:
    whole = Cycle(5, 2, 3, False)
    # The end came inside the block: four of five accepted, two of them used.
    eos = make_row([whole, (5, 4, 2, True)], finish="eos")
    assert counted(eos) == [whole]
    # Nine tokens at most: after 1 + 3 + 3 there is room for one proposal, then for none.
    short = make_row([whole, whole, (1, 0, 1), (0, 0, 1)], k=5, finish="length")
    assert counted(short) == [whole, whole]
    # The same cycles where the answer did not end by length: the drafter itself proposed less.
    assert len(counted(replace(short, finish="eos"))) == 4


def test_a_full_last_cycle_counts() -> None:
    row = make_row([(3, 3, 4), (3, 3, 4)], finish="length")
    assert len(counted(row)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 17}, "k is 17"),
        ({"k": 0, "arm": "draft:d@k3"}, "k is 0 but the arm"),
        ({"clock": "slow"}, "clock is 'slow'"),
        ({"batch": 0}, "batch is 0"),
        ({"wall_ms": -1.0}, "negative"),
        ({"wall_ms": float("nan")}, "wall_ms is nan"),
        ({"wall_ms": "3"}, "wall_ms is '3'"),
        ({"new_tok": 9}, "emitted 3 tokens but new_tok is 9"),
        ({"clock": "phased"}, "only one, has phases_ms"),
        ({"clock": "phased", "phases_ms": {"draft": 1.0}}, "must have draft, verify, sampling, host"),
        ({"domain": "all"}, "kept for the pooled"),
        ({"cycles": ((3, 4, 5, False),), "new_tok": 6}, "accepted 4 of 3"),
        ({"cycles": ((3, 1, 1, False),), "new_tok": 2}, "accepted 1 but emitted 1"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_contradictions_are_refused(change: dict, message: str) -> None:
    row = make_row([(3, 1, 2)])
    with pytest.raises(RowError, match=message) as raised:
        replace(row, **change)
    assert "request 'r0'" in str(raised.value)
