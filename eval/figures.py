"""The figures of the report, drawn from report.json's dict alone; those of speed here, the rest in `anatomy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from eval.against import draw_before_after
from eval.anatomy import acceptance, costs, phase_shares, waterfall
from eval.canvas import BLUE, INK, RED, Figure, draft_style, make_figure, styled
from eval.cells import overall
from eval.load_figures import prediction, shares_by_load, speedup_by_load, verify_surface, what_if
from eval.matrix import draw_matrix
from eval.records import LOOKUP
from eval.show import plain, speed
from eval.views import Report, arm_label, draft_names, is_chain, judged_cell, overall_cells, words


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
    # One line a draft: arms at another temperature of the draft stand beside it.
    lines = {c["arm"] for c in overall_cells(report) if is_chain(c) and c.get("draft_temperature") is None}

    def draw(ax: Axes) -> None:
        for i, name in enumerate(names):
            colour, marker = draft_style(name, names)
            mine = [c for c in table if c["draft"] == name and c["arm"] in lines]
            others = [c for c in table if c["draft"] == name and c["arm"] not in lines]
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
            for c in others:
                # Another policy or a tree: at its largest k, beside the line.
                ax.plot(c["k"] + 0.18, c["value"], marker="*", ms=8, ls="", color=colour, label=arm_label(c, 18))
            for c, at in zip([*mine, *others], [*x, *(c["k"] + 0.18 for c in others)]):
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
    cell = judged and next((c for c in overall(report["cells"]) if c["arm"] == judged["arm"]), judged)
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


DRAWN: Sequence[Callable[[Report], Figure | None]] = (
    draw_before_after, waterfall, phase_shares, shares_by_load, speedup_by_k, speedup_by_load, inversion, acceptance,
    draw_matrix, verify_surface, costs, prediction, what_if, requests,
)  # fmt: skip
