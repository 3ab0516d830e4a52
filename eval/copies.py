"""Copies of a finished report in W&B: tables, figures and summary keys. Nothing is only there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.schema import Track
from distill.track import Scalar, start
from eval.views import Report, ordered_cells

RANKING = (
    "arm", "draft", "k", "value", "low", "high", "e2e_p95_ms", "throughput_speedup", "tok_s", "slower_frac", "alpha",
    "tau",
)  # fmt: skip
CELLS = (
    "arm", "domain", "group", "batch", "num_requests", "status", "alpha", "tau", "decode_ms_per_tok", "T_ms", "V_ms",
    "t_ms", "throughput_speedup", "throughput_tok_s", "ceiling", "alpha_break_even", "predicted_speedup",
    "closure_frac",
)  # fmt: skip


def copy_report(track: Track, folder: Path, config: Mapping[str, Any], report: Report) -> None:
    """Logs a report as a W&B run of its own, named after its folder.

    Args:
        track: the recipe's.
        folder: of the evaluation, its figures written.
        config: of the run: recipe, settings, provenance.
        report: of `report.build_report`.

    Raises:
        TrackError: W&B could not be started.
    """
    tracker = start(track, folder, f"eval-{folder.name}", config)
    code = 1
    try:
        tracker.table(0, "ranking", RANKING, [[c[name] for name in RANKING] for c in report["choice"]["ranking"]])
        rows = [[*(c[name] for name in CELLS), *_speedups(c)] for c in ordered_cells(report)]
        tracker.table(0, "cells", [*CELLS, "speedup_p50", "speedup_low", "speedup_high", "at_equal_memory"], rows)
        for figure in sorted((folder / "figures").glob("*.svg")):
            tracker.figure(0, figure.stem, figure)
        tracker.summary(summary_of(report))
        code = 0
    finally:
        tracker.finish(code)


def _speedups(cell: Mapping[str, Any]) -> list[Scalar]:
    speed, same = cell["latency_speedup"] or {}, cell["throughput_speedup_equal_memory"] or {}
    return [speed.get("p50"), speed.get("ci_low"), speed.get("ci_high"), same.get("speedup")]


def summary_of(report: Report) -> dict[str, Scalar]:
    """The figures that runs are compared by."""
    verdict, choice = report["verdict"], report["choice"]
    tallest = verdict["tallest"] or {}
    return {
        "status": verdict["status"],
        "go": verdict["go"],
        "headline": verdict["headline"],
        "arm": choice["arm"],
        "objective": choice["objective"],
        "value": choice["value"],
        "regret": choice["regret"],
        "num_requests": verdict["num_requests"],
        "tallest": tallest.get("phase"),
        "tallest_share": tallest.get("share"),
        "simulated": bool(report["simulated"]),
    }
