"""The training run in one figure, from train.jsonl alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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

    rows = [json.loads(line) for line in log_file.read_text().splitlines()]
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
