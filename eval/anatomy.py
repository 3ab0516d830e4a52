"""Figures that take a cycle apart: the waterfall, phase shares, acceptance by position, costs by k."""

from __future__ import annotations

from matplotlib.axes import Axes

from engine import costs as model
from engine.costs import Costs
from eval.canvas import (
    BLUE,
    DOMAINS,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    RED,
    SKY,
    Figure,
    draft_style,
    make_figure,
)
from eval.records import ALL, LOOKUP
from eval.show import clocks, plain
from eval.views import Report, arm_label, baseline_cell, draft_names, judged_cell, ladder, overall_cells, share_bars

PHASE_COLOURS = {"verify": BLUE, "draft": ORANGE, "sampling": GREEN, "host": GREY}


def waterfall(report: Report) -> Figure | None:
    """Where the acceptance length goes."""
    cell = judged_cell(report)
    if not cell or not cell["waterfall"]:
        return None
    steps = cell["waterfall"]
    names = ["tokens per\ncycle", "after\nverify", "after\ndraft", "sampling,\nhost", "end to\nend"]

    def draw(ax: Axes) -> None:
        for i, step in enumerate(steps):
            last = i in (0, len(steps) - 1)
            ax.bar(i, step["speedup"], 0.62, color=BLUE if last else SKY, zorder=2)
            if step["loss"] > 0:
                ax.bar(
                    i, step["loss"], 0.62, bottom=step["speedup"], color="#F3D9C9", hatch="////", edgecolor=RED, lw=0
                )
            if i:
                ax.plot([i - 1.31 + 0.62, i + 0.31], [steps[i - 1]["speedup"]] * 2, color=GREY, lw=0.6)
            top = max(step["speedup"], step["speedup"] + step["loss"])
            loss = f"\n({-step['loss']:+.2f})".replace("-", "−") if i else ""
            ax.text(i, top + 0.02 * steps[0]["speedup"], f"{step['speedup']:.2f}{loss}", ha="center", fontsize=7)
        ax.axhline(1, color=INK, lw=0.9, ls=(0, (4, 2)))
        ax.set_xticks(range(len(steps)), names, fontsize=7)
        ax.set_ylim(0, steps[0]["speedup"] * 1.18)
        ax.set_ylabel("speedup over no speculation")
        ax.grid(axis="x", visible=False)

    caption = (
        f"{arm_label(cell)}, all requests together. Each bar is what is left of the tokens gained per cycle after "
        "paying for the next part; hatched is what that part took. Under the dashed line speculation is slower."
    )
    return make_figure("waterfall", "From tokens per cycle to end-to-end speedup", caption, list(steps), draw)


def phase_shares(report: Report) -> Figure | None:
    """Time of a token by phase, before and after."""
    bars, cell = share_bars(report), judged_cell(report) or baseline_cell(report)
    if not bars or cell is None:
        return None

    def draw(ax: Axes) -> None:
        for y, bar in enumerate(bars):
            left = 0.0
            for name, colour in PHASE_COLOURS.items():
                width = bar[f"{name}_ms_per_tok"]
                ax.barh(y, width, 0.58, left=left, color=colour, label=name if y == 0 else None)
                if bar[f"{name}_share"] >= 0.08 and width > 0.1 * bars[0]["total_ms_per_tok"]:
                    white = "white" if colour == BLUE else INK
                    ax.text(left + width / 2, y, f"{bar[f'{name}_share']:.0%}", ha="center", va="center", color=white)
                left += width
            ax.text(left + 0.012 * ax.get_xlim()[1], y, f" {left:.1f}", va="center")
        ax.set_yticks(range(len(bars)), ["\n".join(bar["label"].rsplit(", ", 1)) for bar in bars])
        ax.invert_yaxis()
        ax.margins(x=0.14)
        ax.set_xlim(left=0)
        ax.set_xlabel("decode milliseconds a token")
        ax.grid(axis="y", visible=False)
        ax.legend(ncol=4, loc="lower center", bbox_to_anchor=(0.45, 1.0), handlelength=1, columnspacing=1.2)

    caption = (
        "Decode time of one token by phase, prefill left out; percentages are shares of the arm's own decode time. "
        f"From phased rows; the phase clock against the bare one, {arm_label(cell)}: {clocks(cell['clocks'])}."
    )
    return make_figure("phase_shares", "Where the time goes", caption, bars, draw, height=1.25 + 0.42 * len(bars))


def acceptance(report: Report) -> Figure | None:
    """P(first j accepted) by position and domain."""
    cells = [c for c in ladder(report, "longest") if c["accept_by_position"]]
    if not cells:
        return None
    table = [
        {"draft": c["draft"], "k": c["k"], "domain": c["domain"], **position}
        for c in cells
        for position in c["accept_by_position"]
    ]

    def draw(ax: Axes) -> None:
        for i, c in enumerate(cells):
            at = c["accept_by_position"]
            pooled = c["domain"] == ALL
            colour, marker = (INK, "x") if pooled else (DOMAINS[i % 6], MARKERS[i % 6])
            ax.plot(
                [p["j"] for p in at], [p["A"] for p in at], marker=marker, color=colour, label=plain(c["domain"], 20)
            )
        ax.set_xticks([p["j"] for p in cells[0]["accept_by_position"]])
        ax.set_ylim(0, 1)
        ax.set_xlabel("position j in the draft")
        ax.set_ylabel("P(first j accepted)")
        ax.legend(loc="upper right")

    caption = f"{arm_label(cells[0])}. Cycles cut by the end of the answer are left out."
    return make_figure("acceptance", "Acceptance by position and domain", caption, table, draw)


def costs(report: Report) -> Figure | None:
    """V(k), D(k) of each draft, and T."""
    source = report["costs"] or [c["costs"] for c in overall_cells(report) if c["costs"] and c["draft"] != LOOKUP]
    found: dict[str, Costs] = {}
    for data in source:
        found.setdefault(data["draft"], Costs.from_json(data))
    if not found:
        return None
    one = next(iter(found.values()))
    table = [
        {
            "draft": c.draft, "context": c.context, "batch": c.batch, "k": k, "T_ms": c.T_ms,
            "V_ms": model.verify_ms(c, k), "D_ms": model.draft_ms(c, k), "cycle_ms": model.cycle_ms(c, k),
        }
        for c in found.values()
        for k in sorted(c.V_ms)
    ]  # fmt: skip

    def draw(ax: Axes) -> None:
        ks = sorted(one.V_ms)
        ax.axhline(one.T_ms, color=GREY, lw=0.9, ls=(0, (4, 2)), label="T, a baseline token")
        ax.plot(ks, [one.V_ms[k] for k in ks], marker="P", color=INK, label="V(k), verify")
        for c in found.values():
            mine = [0, *c.ks]
            colour, marker = draft_style(c.draft, draft_names(report))
            ax.plot(mine, [model.draft_ms(c, k) for k in mine], marker=marker, color=colour,
                    label=f"D(k), {plain(c.draft, 18)}, {c.t_ms:.2f} a token")  # fmt: skip
        ax.set_ylim(bottom=0)
        ax.set_xticks(ks)
        ax.set_xlabel("proposed tokens a cycle, k")
        ax.set_ylabel("milliseconds a cycle")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, handlelength=1.6, columnspacing=1.0)

    measured = "Measured by the plan" if report["costs"] else "Fitted to this evaluation's rows"
    caption = f"{measured} at {one.context} tokens of context, batch {one.batch}."
    return make_figure("costs", "What a cycle costs", caption, table, draw, height=3.1)
