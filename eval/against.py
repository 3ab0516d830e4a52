"""Before and after a change: the judged arm's time by phase in two reports, the tallest bar named. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from eval.anatomy import PHASE_COLOURS
from eval.canvas import BLUE, INK, Figure, make_figure
from eval.entry import whole
from eval.records import PHASES
from eval.show import interval, ms, percent, plain, speed
from eval.views import Report, arm_label, baseline_cell, judged_cell

# Settings that two evaluations should share, and how far the baseline may differ between them.
ALIKE = (
    *("target", "target_sha256", "device", "num_threads", "dtype", "temperature", "objective"),
    *("domain", "domains", "num_requests", "max_new_tok", "batches"),
)
MACHINE_FRAC = 0.05


def before_after(old: Report, new: Report) -> dict[str, Any]:
    """Sets the judged arms of two reports beside each other.

    Args:
        old, new: report.json as a mapping; a report of an earlier format will do.

    Returns:
        `before` and `after`: arm, label, speedup (median), decode_ms_per_tok, context_tok, batch, num_requests, `share`
        and `ms_per_tok` by phase, `tallest`; `change_ms` by phase; `most_changed`; `same_load` (context within a
        tenth, equal batch); `sentence`.

    Raises:
        ValueError: a report in which nothing was judged, or without phase shares, named.
    """
    before, after = _side(old, "the earlier report"), _side(new, "this report")
    change = {name: after["ms_per_tok"][name] - before["ms_per_tok"][name] for name in PHASES}
    most = max(PHASES, key=lambda name: abs(change[name]))
    near = abs(after["context_tok"] - before["context_tok"]) <= 0.1 * max(1.0, before["context_tok"])
    same = near and after["batch"] == before["batch"]
    fell = "fell" if change[most] < 0 else "rose"
    sentence = (
        f"The tallest bar was {before['tallest']} ({percent(before['share'][before['tallest']])} of "
        f"{ms(before['decode_ms_per_tok'])} ms a token) and is {after['tallest']} "
        f"({percent(after['share'][after['tallest']])} of {ms(after['decode_ms_per_tok'])} ms); {most} {fell} most, by "
        f"{ms(abs(change[most]))} ms a token. The median speedup went from {_spanned(before)} to {_spanned(after)}."
        + ("" if same else " The loads differ: the bars can not be compared one to one.")
        + _unlike(old, new, before, after)
    )
    return {
        "before": before,
        "after": after,
        "change_ms": change,
        "most_changed": most,
        "same_load": same,
        "sentence": sentence,
    }


def _spanned(side: Mapping[str, Any]) -> str:
    """A speedup with its interval: "1.31x (1.22 to 1.40)"."""
    span = "" if side["low"] is None else f" ({interval(side['low'], side['high'])})"
    return speed(side["speedup"]) + span


def _unlike(old: Report, new: Report, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What else differs between two evaluations, so that it is not taken for the change that is looked at."""
    was, now = old["settings"], new["settings"]
    changed = [f"{key} {plain(was[key], 40)} -> {plain(now[key], 40)}"
               for key in ALIKE if key in was and key in now and was[key] != now[key]]  # fmt: skip
    said = f" Other settings: {', '.join(changed)}." if changed else ""
    one, two = before["baseline_ms"], after["baseline_ms"]
    if one and two and abs(two / one - 1) > MACHINE_FRAC:
        said += f" Without speculation a token took {ms(one)} ms before and {ms(two)} after: machine or load differ."
    return said


def read_earlier(path: str | Path) -> dict[str, Any]:
    """Reads an earlier report and checks that it can be compared with.

    Args:
        path: report.json, or the folder of an evaluation.

    Raises:
        ValueError: no report, or one in which nothing was judged.
    """
    path = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--against {path}: no report.json can be read there ({error})") from error
    if not isinstance(report, dict) or not {"cells", "verdict", "settings"} <= set(report):
        raise ValueError(f"--against {path}: no report of an evaluation; give the report.json that eval.run wrote")
    if report.get("simulated"):
        raise ValueError(f"--against {path}: its acceptance was simulated; give the report of a real evaluation")
    with whole(path, "report"):
        _side(report, f"--against {path}")
        before_after(report, report)
    return report


def _side(report: Report, name: str) -> dict[str, Any]:
    cell = judged_cell(report) if report.get("verdict", {}).get("arm") else None
    if cell is None or not cell["share"] or not cell["decode_ms_per_tok"]:
        raise ValueError(
            f"{name} has no judged arm with phase shares; compare reports of evaluations that measured a draft with "
            "phased rows (eval.phased_every)"
        )
    share = {phase: cell["share"][phase] for phase in PHASES}
    total = cell["decode_ms_per_tok"]
    return {
        "arm": cell["arm"],
        "label": arm_label(cell),
        **{
            name: (cell["latency_speedup"] or {}).get(key)
            for name, key in (("speedup", "p50"), ("low", "ci_low"), ("high", "ci_high"))
        },
        "baseline_ms": (baseline_cell(report) or {}).get("decode_ms_per_tok"),
        "decode_ms_per_tok": total,
        "context_tok": cell["context_tok"]["p50"],
        "batch": cell["batch"],
        "num_requests": cell["num_requests"],
        "share": share,
        "ms_per_tok": {phase: value * total for phase, value in share.items()},
        "tallest": max(PHASES, key=lambda phase: share[phase]),
    }


def draw_before_after(report: Report) -> Figure | None:
    """The bottleneck-share chart before and after; None where no earlier report was given."""
    found: Mapping[str, Any] | None = report["against"]
    if not found:
        return None
    sides = [("before", found["before"]), ("after", found["after"])]
    table = [
        {"when": when, "arm": s["arm"], "phase": name, "share": s["share"][name], "ms_per_tok": s["ms_per_tok"][name],
         "tallest": name == s["tallest"]}
        for when, s in sides
        for name in PHASES
    ]  # fmt: skip

    def draw(ax: Axes) -> None:
        tallest = max(s["decode_ms_per_tok"] for _, s in sides)
        for y, (_, side) in enumerate(sides):
            left = 0.0
            for name, colour in PHASE_COLOURS.items():
                width = side["ms_per_tok"][name]
                top = name == side["tallest"]
                ax.barh(y, width, 0.6, left=left, color=colour, edgecolor=INK if top else "none", lw=1.4 if top else 0,
                        label=name if y == 0 else None)  # fmt: skip
                if width > 0.08 * tallest:
                    said = f"{name} {side['share'][name]:.0%}" if top else f"{side['share'][name]:.0%}"
                    ink = "white" if colour == BLUE else INK
                    ax.text(left + width / 2, y, said, ha="center", va="center", color=ink, fontsize=7)
                left += width
            ax.text(left + 0.015 * tallest, y, f"{left:.1f}", va="center", fontsize=7)
        names = [f"{when}\n{plain(s['label'], 20)}" for when, s in sides]
        ax.set_yticks(range(len(sides)), names)
        ax.invert_yaxis()
        ax.set_xlim(0, 1.12 * tallest)
        ax.set_xlabel("decode milliseconds a token")
        ax.grid(axis="y", visible=False)
        ax.legend(ncol=4, loc="lower center", bbox_to_anchor=(0.45, 1.0), handlelength=1, columnspacing=1.2)

    return make_figure("before_after", "Before and after", found["sentence"], table, draw, height=2.1)
