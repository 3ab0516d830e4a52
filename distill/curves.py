"""The training run in one figure, from train.jsonl alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def draw_curves(log_file: Path, figure: Path) -> Path:
    """Draws loss, acceptance on held-out answers by domain, and predicted speedup over optimizer steps.

    Args:
        log_file: train.jsonl; of a step that several attempts took, the last one counts.
        figure: SVG file to write.

    Returns:
        `figure`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_log(log_file)
    taken = {row["step"]: row for row in rows if "loss" in row}
    scored = {row["step"]: row for row in rows if "val/speedup" in row}
    domains = sorted({name.split("/")[1] for row in scored.values() for name in row if name.count("/") == 2})
    panels: Sequence[tuple[str, str, Mapping[int, Mapping[str, Any]], Mapping[str, str]]] = (
        ("loss", "nats per supervised token", taken, {"loss": "training"}),
        ("teacher-forced acceptance", "alpha, greedy", scored, {f"val/{name}/alpha": name for name in domains}),
        (
            "predicted end-to-end speedup",
            "times the baseline",
            scored,
            {f"val/{name}/speedup": name for name in domains},
        ),
    )
    canvas, axes = plt.subplots(1, len(panels), figsize=(12, 3.2), layout="constrained")
    for axis, (title, unit, source, lines) in zip(axes, panels):
        for (key, label), dash in zip(lines.items(), ("-", "--", ":", "-.") * len(lines)):
            steps = sorted(step for step in source if key in source[step])
            axis.plot(
                steps, [source[step][key] for step in steps], dash, label=label, marker="." if len(steps) < 40 else ""
            )
        axis.set(title=title, xlabel="optimizer step", ylabel=unit)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend()
    canvas.savefig(figure, format="svg")
    plt.close(canvas)
    return figure


def read_log(log_file: Path) -> list[dict[str, Any]]:
    """The rows of train.jsonl; a line that a killed run left half-written is left out with a warning."""
    rows: list[dict[str, Any]] = []
    if not log_file.exists():
        log.warning("%s is gone: the curves are empty", log_file)
        return rows
    for number, line in enumerate(log_file.read_bytes().split(b"\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            log.warning("%s:%d is half-written or damaged, and left out of the curves", log_file, number)
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
