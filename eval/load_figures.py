"""Figures over loads: shares and speedup by context and batch, the verify surface, prediction against measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from engine.surface import read_table
from eval.anatomy import PHASE_COLOURS
from eval.canvas import BLUE, DOMAINS, GREY, INK, MARKERS, Figure, draft_style, make_figure
from eval.records import PHASES
from eval.show import medians, percent, plain
from eval.views import Report, arm_label, draft_names, is_chain, judged_cell, load_label, loads

LINES = ("-", "--", ":", "-.")


def shares_by_load(report: Report) -> Figure | None:
    """Where the judged arm's time goes at every context and batch."""
    judged = judged_cell(report)
    cells = [c for c in loads(report, judged["arm"]) if c["share"]] if judged else []
    if judged is None or len(cells) < 2:
        return None
    table = [
        {
            "load": load_label(c), "context_tok": c["context_tok"]["p50"], "batch": c["batch"],
            "num_requests": c["num_requests"], "decode_ms_per_tok": c["decode_ms_per_tok"],
            **{f"{n}_share": c["share"][n] for n in (*PHASES, "prefix_kv", "waste")},
            "tallest": max(PHASES, key=lambda n: c["share"][n]),
        }
        for c in cells
    ]  # fmt: skip

    def draw(ax: Axes) -> None:
        for y, row in enumerate(table):
            left = 0.0
            for name, colour in PHASE_COLOURS.items():
                width = 100 * row[f"{name}_share"]
                ax.barh(y, width, 0.66, left=left, color=colour, label=name if y == 0 else None)
                if width >= 9:
                    ink = "white" if colour == BLUE else INK
                    ax.text(left + width / 2, y, f"{width:.0f}", ha="center", va="center", color=ink, fontsize=7)
                left += width
            if row["prefix_kv_share"]:
                ax.barh(y - 0.27, 100 * row["prefix_kv_share"], 0.12, color=INK,
                        label="prefix KV, inside verify" if y == 0 else None)  # fmt: skip
            ax.text(101.5, y, f"{row['decode_ms_per_tok']:.1f}", va="center", fontsize=7)
        ax.text(101.5, -0.75, "ms/tok", va="center", fontsize=7, color=GREY)
        ax.set_yticks(range(len(table)), [row["load"] for row in table], fontsize=7)
        ax.set_ylim(len(table) - 0.45, -0.95)
        ax.set_xlim(0, 114)
        ax.set_xticks([0, 25, 50, 75, 100])
        ax.set_xlabel("share of decode time, %")
        ax.grid(axis="y", visible=False)
        ax.legend(ncol=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), handlelength=1, columnspacing=1.2, fontsize=7)

    caption = (
        f"{arm_label(judged)} by context group (its median prompt, tokens) and batch B. The number at the right is its "
        "decode time a token."
    )
    return make_figure(
        "shares_by_load", "Where the time goes, by load", caption, table, draw, height=1.35 + 0.27 * len(table)
    )


def speedup_by_load(report: Report) -> Figure | None:
    """The two stories: one request's latency and tokens a second, by context and batch."""
    judged = judged_cell(report)
    cells = loads(report, judged["arm"]) if judged else []
    if judged is None or len(cells) < 2:
        return None
    table = [
        {
            "load": load_label(c), "group": c["group"], "context_tok": c["context_tok"]["p50"], "batch": c["batch"],
            "num_requests": c["num_requests"], "latency_p50": c["latency_speedup"]["p50"],
            "latency_low": c["latency_speedup"]["ci_low"], "latency_high": c["latency_speedup"]["ci_high"],
            "slower_frac": c["slower_frac"], "throughput": c["throughput_speedup"], "ceiling": c["ceiling"],
        }
        for c in cells
    ]  # fmt: skip
    batches = sorted({row["batch"] for row in table})
    groups = list(dict.fromkeys(row["group"] for row in sorted(table, key=lambda r: r["context_tok"])))
    over = "batch" if len(batches) > 1 else "group"
    ticks: list[Any] = batches if over == "batch" else groups

    def draw(ax: Axes) -> None:
        series = groups if over == "batch" else batches
        for i, name in enumerate(series):
            mine = [row for row in table if row["group" if over == "batch" else "batch"] == name]
            mine.sort(key=lambda row: ticks.index(row[over]))
            colour, marker = DOMAINS[i % len(DOMAINS)], MARKERS[i % len(MARKERS)]
            x = [ticks.index(row[over]) + 0.06 * (i - (len(series) - 1) / 2) for row in mine]
            y = np.array([row["latency_p50"] for row in mine])
            ends = [(row["latency_low"] or v, row["latency_high"] or v) for row, v in zip(mine, y)]
            error = np.clip(np.array([[v - e[0], e[1] - v] for v, e in zip(y, ends)]).T, 0, None)
            label = plain(name, 14) if over == "batch" else f"B = {name}"
            ax.errorbar(x, y, error, marker=marker, color=colour, elinewidth=0.9, capsize=2, label=label)
            wide = [np.nan if row["throughput"] is None else row["throughput"] for row in mine]
            ax.plot(x, wide, marker=marker, color=colour, ls="--", mfc="white")
        ax.plot([], [], color=GREY, label="latency, p50")
        ax.plot([], [], color=GREY, ls="--", label="throughput")
        ax.axhline(1, color=INK, lw=0.9, ls=(0, (4, 2)))
        ax.set_xticks(range(len(ticks)), [plain(t, 12) for t in ticks])
        ax.set_xlim(-0.35, len(ticks) - 0.65)
        ax.set_xlabel("rows decoded together, B" if over == "batch" else "context group")
        ax.set_ylabel("speedup over no speculation")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3, handlelength=1.8, columnspacing=1.0)

    caption = (
        f"{arm_label(judged)}. Solid: median paired speedup of a request, 95% interval. Dashed: tokens a second over "
        "the baseline's. At B = 1 the two differ only by how requests are weighed."
    )
    return make_figure("speedup_by_load", "Latency and throughput, by load", caption, table, draw, height=3.1)


def verify_surface(report: Report) -> Figure | None:
    """V(k, ctx, B): measured points on the fitted surface."""
    judged = judged_cell(report)
    surface: Mapping[str, Any] | None = judged and report["model"]["drafts"].get(judged["draft"])
    if judged is None or surface is None:
        return None
    mine = [
        c
        for c in report["cells"]
        if c["draft"] == judged["draft"] and c["V_ms"] and c["domain"] == judged["domain"] and is_chain(c)
    ]
    apart = [c for c in mine if c["group"] != "all"] or mine
    widths, times = np.array(surface["widths"]).T

    def by_batch(batch: int) -> float:
        return read_table(surface["kv"], batch)

    ends = {min(c["batch"] for c in apart), max(c["batch"] for c in apart)} if apart else set()
    order = {c["group"]: c["context_tok"]["p50"] for c in apart}
    seen = sorted({(c["batch"], c["group"]) for c in apart if c["batch"] in ends}, key=lambda n: (n[0], order[n[1]]))
    table: list[dict[str, Any]] = []
    for batch, group in seen:
        here = [c for c in apart if (c["batch"], c["group"]) == (batch, group)]
        context = float(np.mean([c["context_tok"]["p50"] + c["new_tok"]["p50"] / 2 for c in here]))
        # Chains of one k at several temperatures of the draft take equal passes.
        known = {k: float(np.mean([c["V_ms"] for c in here if c["k"] == k])) for k in {c["k"] for c in here}}
        for k in range(surface["max_k"] + 1):
            fitted = float(np.interp(batch * (k + 1), widths, times)) + by_batch(batch) * batch * context
            table.append(
                {
                    "batch": batch, "group": group, "context_tok": round(context), "k": k, "fitted_ms": fitted,
                    "measured_ms": known.get(k),
                }
            )  # fmt: skip
    if not table:
        return None

    def draw(ax: Axes) -> None:
        names = list(dict.fromkeys(group for _, group in seen))
        batches = sorted({b for b, _ in seen})
        for batch, group in seen:
            rows = [row for row in table if (row["batch"], row["group"]) == (batch, group)]
            colour = DOMAINS[names.index(group) % len(DOMAINS)]
            marker, line = MARKERS[batches.index(batch) % len(MARKERS)], LINES[batches.index(batch) % len(LINES)]
            label = f"{rows[0]['context_tok']:,} tok, B = {batch}"
            ax.plot([r["k"] for r in rows], [r["fitted_ms"] for r in rows], color=colour, ls=line, lw=1.1)
            dots = [(r["k"], r["measured_ms"]) for r in rows if r["measured_ms"] is not None]
            ax.plot([k for k, _ in dots], [v for _, v in dots], marker, color=colour, label=label)
        tall = [row["fitted_ms"] for row in table]
        if max(tall) > 8 * min(tall):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        else:
            ax.set_ylim(0, 1.12 * max(tall))
        ax.set_xticks(range(surface["max_k"] + 1))
        ax.set_xlabel("proposed tokens a cycle, k")
        ax.set_ylabel("verify pass, ms")
        ax.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3, handlelength=1.0, columnspacing=0.8, fontsize=7
        )

    fit, quality = surface["fit"], ""
    if fit:
        worst = percent(fit["worst_frac"], 1)
        quality = f" A plane in B(k + 1) and cached tokens fits with R² {fit['r2']:.3f}, worst residual {worst}."
    caption = (
        "Marks are measured, lines are the model: a table over the tokens of a pass, and for every 1,000 tokens in the "
        f"cache {', '.join(f'{1e3 * by_batch(b):.2f} ms at batch {b}' for b in sorted(ends))}.{quality}"
    )
    return make_figure("verify_surface", "Verify time V(k, context, B)", caption, table, draw, height=3.2)


SCHEME_COLOURS = ("other requests", "other cells", "other loads", "other k", "plan")


def prediction(report: Report) -> Figure | None:
    """Predicted against measured speedup of cells that the model was not fitted to."""
    table = [dict(p) for p in report["model"]["held_out"]["points"]]
    table += [
        {
            "scheme": "plan", "draft": c["draft"], "k": c["k"], "domain": c["domain"], "group": c["group"],
            "batch": c["batch"], "context_tok": round(c["context_tok"]["p50"]), "new_tok": round(c["new_tok"]["p50"]),
            "num_requests": c["num_requests"], "measured": c["latency_speedup"]["total"],
            "predicted": c["predicted_speedup"], "error_frac": c["prediction_error_frac"], "measured_load": True,
        }
        for c in report["cells"]
        if c["predicted_speedup"] is not None and c["predicted_from"] == "plan" and c["status"] == "ok"
    ]  # fmt: skip
    if not table:
        return None

    def draw(ax: Axes) -> None:
        every = [v for row in table for v in (row["measured"], row["predicted"])]
        low, high = min(every) - 0.06, max(every) + 0.06
        ends = np.array([low, high])
        ax.fill_between(ends, ends * 0.95, ends * 1.05, color="#E8EEF4", lw=0, label="within 5%")
        ax.plot(ends, ends, color=GREY, lw=0.8)
        for i, scheme in enumerate(SCHEME_COLOURS):
            mine = [row for row in table if row["scheme"] == scheme]
            if mine:
                label = "the plan's costs" if scheme == "plan" else scheme
                ax.scatter([r["measured"] for r in mine], [r["predicted"] for r in mine], s=13, marker=MARKERS[i],
                           color=DOMAINS[i], label=label, zorder=3, alpha=0.75, lw=0)  # fmt: skip
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
        ax.set_xlabel("measured speedup")
        ax.set_ylabel("predicted speedup")
        ax.legend(loc="upper left", handlelength=1.0)

    found = report["model"]["held_out"]["schemes"]
    errors = "; ".join(f"{name} {percent(s['mean_abs_error_frac'], 1)}" for name, s in found.items())
    caption = "A mark is a cell; costs were fitted without it, acceptance is its own. " + (
        f"Mean absolute error, costs from {errors}." if errors else "No cell could be held out."
    )
    return make_figure("prediction", "Prediction against measurement", caption, table, draw, height=3.3)


def what_if(report: Report) -> Figure | None:
    """What the judged arm would give if one thing were different."""
    table = [w for w in report["model"]["what_if"] if w["speedup"] is not None]
    judged = judged_cell(report)
    if len(table) < 2 or judged is None:
        return None
    colour_of = draft_style(judged["draft"], draft_names(report))[0]

    def draw(ax: Axes) -> None:
        for y, row in enumerate(table):
            own = y == 0
            ax.barh(y, row["speedup"], 0.62, color=colour_of if own else "#A9C9E0", zorder=2)
            ax.plot([row["ceiling"]] * 2, [y - 0.36, y + 0.36], color=INK, lw=1.4, zorder=3,
                    label="ceiling" if own else None)  # fmt: skip
            ax.text(row["speedup"] + 0.03, y, f"{row['speedup']:.2f}", va="center", fontsize=7, zorder=4,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85})  # fmt: skip
        ax.axvline(1, color=INK, lw=0.9, ls=(0, (4, 2)))
        names = [row["what"] + ("" if row["measured_load"] else " *") for row in table]
        ax.set_yticks(range(len(table)), names, fontsize=7)
        ax.set_ylim(len(table) - 0.5, -0.7)
        ax.set_xlim(left=0)
        ax.set_xlabel("predicted end-to-end speedup")
        ax.grid(axis="y", visible=False)
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), handlelength=1.0)

    starred = " *: outside the measured loads." if any(not row["measured_load"] for row in table) else ""
    caption = (
        f"{arm_label(judged)}, one request of {medians(table[0])}, by the cost model; one thing changed at a "
        f"time.{starred}"
    )
    return make_figure("what_if", "What if", caption, table, draw, height=1.3 + 0.24 * len(table))
