"""The figures of the report, drawn from report.json's dict alone; those of speed here, the rest in `anatomy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from eval.anatomy import acceptance, costs, phase_shares, waterfall
from eval.canvas import BLUE, GREY, INK, RED, Figure, draft_style, make_figure, styled
from eval.cells import overall
from eval.records import LOOKUP
from eval.show import plain, speed
from eval.views import Report, arm_label, draft_names, judged_cell, words


def draw_all(report: Report) -> list[Figure]:
    """Every figure that the report has data for."""
    with styled():
        return [figure for draw in DRAWN if (figure := draw(report)) is not None]


def speedup_by_k(report: Report) -> Figure | None:
    """The objective by draft length, with intervals."""
    ranking = [c for c in report["choice"]["ranking"] if c["k"]]
    if not ranking:
        return None
    names = draft_names(report)
    table = sorted(ranking, key=lambda c: (names.index(c["draft"]), c["k"]))

    def draw(ax: Axes) -> None:
        for i, name in enumerate(names):
            colour, marker = draft_style(name, names)
            mine = [c for c in table if c["draft"] == name]
            shift = 0.07 * (i - (len(names) - 1) / 2)
            value = np.array([c["value"] for c in mine])
            low = np.array([c["low"] if c["low"] is not None else c["value"] for c in mine])
            high = np.array([c["high"] if c["high"] is not None else c["value"] for c in mine])
            error = np.clip([value - low, high - value], 0, None)
            style = "--" if name == LOOKUP else "-"
            x = [c["k"] + shift for c in mine]
            ax.errorbar(
                x, value, error, marker=marker, ls=style, color=colour, elinewidth=0.9, capsize=2,
                label=plain(words(name), 24),
            )  # fmt: skip
            for c, at in zip(mine, x):
                if c["arm"] == report["choice"]["arm"]:
                    ax.plot(at, c["value"], "o", ms=11, mfc="none", mec=INK, mew=1.2, label="chosen")
        ax.axhline(1, color=INK, lw=0.9, ls=(0, (4, 2)))
        ax.set_xticks(sorted({c["k"] for c in table}))
        ax.set_xlabel("proposed tokens a cycle, k")
        ax.set_ylabel("end-to-end speedup")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, handlelength=1.6, columnspacing=1.2)

    caption = f"{report['choice']['rank_key'].capitalize()}, 95% bootstrap interval over requests."
    return make_figure("speedup_by_k", "Speedup by draft length", caption, table, draw, height=3.1)


def inversion(report: Report) -> Figure | None:
    """Tokens a cycle against end-to-end speedup of every arm."""
    table = [c for c in report["choice"]["ranking"] if c["k"] and c["tau"] is not None]
    if len(table) < 2:
        return None
    names = draft_names(report)

    def draw(ax: Axes) -> None:
        for name in names:
            mine = sorted((c for c in table if c["draft"] == name), key=lambda c: c["k"])
            colour, marker = draft_style(name, names)
            tau, value = [c["tau"] for c in mine], [c["value"] for c in mine]
            ax.plot(tau, value, marker=marker, color=colour, lw=0.8, label=plain(words(name), 24))
            for c in mine:
                ax.annotate(str(c["k"]), (c["tau"], c["value"]), (6, 4), textcoords="offset points", fontsize=7)
                if c["arm"] == report["choice"]["arm"]:
                    ax.plot(c["tau"], c["value"], "o", ms=11, mfc="none", mec=INK, mew=1.2, label="chosen")
        ax.axhline(1, color=INK, lw=0.9, ls=(0, (4, 2)))
        ax.set_xlabel("tokens a cycle, tau")
        ax.set_ylabel("end-to-end speedup")
        ax.margins(0.08)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, handlelength=1.6, columnspacing=1.2)

    caption = "Each mark is an arm, with its k. More accepted tokens to the right; only height is time saved."
    return make_figure("inversion", "Acceptance is not speed", caption, table, draw, height=3.1)


def requests(report: Report) -> Figure | None:
    """Every request's own speedup."""
    judged = judged_cell(report)
    cell = judged and next(c for c in overall(report["cells"]) if c["arm"] == judged["arm"])
    if not cell or not cell["pairs"]:
        return None
    pairs = cell["pairs"]
    domains = list(dict.fromkeys(p["domain"] for p in pairs))

    def draw(ax: Axes) -> None:
        for y, domain in enumerate(domains):
            gains = sorted(p["speedup"] for p in pairs if p["domain"] == domain)
            spread = [y + 0.2 * (((i * 7) % 5) - 2) / 2 for i in range(len(gains))]
            slow = [g < 1 for g in gains]
            ax.scatter(gains, spread, s=20, c=[RED if s else BLUE for s in slow], alpha=0.8, lw=0, zorder=3)
            middle = float(np.median(gains))
            ax.plot([middle] * 2, [y - 0.33, y + 0.33], color=INK, lw=1.6, zorder=4)
            ax.text(middle, y - 0.37, speed(middle), ha="center", va="bottom", fontsize=7)
        ax.axvline(1, color=INK, lw=0.9, ls=(0, (4, 2)))
        left = ax.get_xlim()[0]
        if left < 1:
            ax.axvspan(left, 1, color="#FBEFE8", lw=0, zorder=0)
            ax.set_xlim(left=left)
        ax.set_yticks(range(len(domains)), [plain(d, 16) for d in domains])
        ax.set_ylim(len(domains) - 0.5, -0.65)
        ax.set_xlabel("paired end-to-end speedup of one request")
        ax.grid(axis="y", visible=False)

    caption = (
        f"{arm_label(cell)}. A dot is a request against its own baseline; red dots in the shaded part were made "
        "slower. The line is the domain's median."
    )
    return make_figure(
        "requests", "Every request", caption, list(pairs), draw, height=1.2 + 0.62 * max(2, len(domains))
    )


def prediction(report: Report) -> Figure | None:
    """Predicted against measured speedup of every cell."""
    cells = [c for c in report["cells"] if c["predicted_speedup"] is not None]
    if not cells:
        return None
    table = [
        {
            "draft": c["draft"], "k": c["k"], "domain": c["domain"], "group": c["group"], "batch": c["batch"],
            "measured": c["latency_speedup"]["total"], "predicted": c["predicted_speedup"],
            "error_frac": c["prediction_error_frac"], "costs_from": c["predicted_from"],
        }
        for c in cells
    ]  # fmt: skip
    names = sorted({row["draft"] for row in table})
    mean = float(np.mean([abs(row["error_frac"]) for row in table]))

    def draw(ax: Axes) -> None:
        every = [v for row in table for v in (row["measured"], row["predicted"])]
        low, high = min(every) - 0.06, max(every) + 0.06
        ends = np.array([low, high])
        ax.fill_between(ends, ends * 0.95, ends * 1.05, color="#E8EEF4", lw=0, label="within 5%")
        ax.plot(ends, ends, color=GREY, lw=0.8)
        for name in names:
            colour, marker = draft_style(name, draft_names(report))
            mine = [row for row in table if row["draft"] == name]
            ax.scatter(
                [r["measured"] for r in mine], [r["predicted"] for r in mine], s=18, color=colour,
                marker=marker, label=plain(name, 20), zorder=3, alpha=0.85, lw=0,
            )  # fmt: skip
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
        ax.set_xlabel("measured speedup")
        ax.set_ylabel("predicted speedup")
        ax.legend(loc="upper left")

    source = " and ".join(sorted({row["costs_from"] for row in table}))
    caption = (
        f"One mark per draft, k and domain, all requests together. Costs from the {source}, acceptance from the rows. "
        f"Mean absolute error {mean:.1%}."
    )
    return make_figure("prediction", "Prediction against measurement", caption, table, draw, height=3.1)


DRAWN: Sequence[Callable[[Report], Figure | None]] = (
    waterfall, phase_shares, speedup_by_k, inversion, acceptance, requests, costs, prediction,
)  # fmt: skip
