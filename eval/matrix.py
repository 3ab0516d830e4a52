"""Acceptance by draft and domain, at one k that all drafts share: what one draft for all domains costs. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from textwrap import wrap
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from eval.bootstrap import paired_difference_interval, ratio_interval
from eval.canvas import BLUE, INK, Figure, make_figure
from eval.cells import Settings
from eval.records import RequestRow, is_chain, is_control
from eval.show import interval, number, plain
from eval.stats import counted_cycles

Report = Mapping[str, Any]
# Accepted and proposed tokens of each request.
Sums = dict[str, tuple[int, int]]
TITLE = "Acceptance by draft and domain"


class Setting(NamedTuple):
    """What arms must have in common for their acceptance to be compared: alpha falls with k."""

    k: int
    rule: str
    draft_temperature: float | None


def acceptance_matrix(
    rows: Sequence[RequestRow],
    settings: Settings,
    batch: int,
    drafts: Sequence[Mapping[str, Any]] = (),
    judged: str | None = None,
    chosen: str | None = None,
    gap: tuple[str, float] | None = None,
) -> dict[str, Any] | None:
    """alpha of every draft in every domain, over the requests that all drafts answered with the same chain.

    Args:
        rows: measured rows of every arm; of the controls nothing is taken.
        settings: of the report.
        batch: whose rows.
        drafts: entries {name, trained_on, ...} of the report.
        judged, chosen: arms of the verdict and of the choice.
        gap: the worst domain and what the judged arm loses there, where the rule on the domain gap failed.

    Returns:
        k, rule, draft_temperature and `which` (why these); domains; `drafts`, each {name, trained_on}; `cells`, each
        {draft, domain, num_requests, alpha, low, high, best, lost, lost_low, lost_high, level}: `lost` is the column's
        best alpha less this one, with its interval over the same resampled requests; `level`: that interval holds 0.
        Figures are None where fewer than `min_requests` are shared. `sentence`. Only `why_not` where no arms can be
        compared; None with fewer than two drafts or domains.
    """
    mine = [r for r in rows if r.batch == batch and r.k and not is_control(r.draft)]
    trained = {d["name"]: (d.get("trained_on") or {}).get("domain") for d in drafts}
    domains = list(dict.fromkeys(r.domain for r in mine))
    place = {name: domains.index(of) if (of := trained.get(name)) in domains else len(domains) for name in trained}
    names = sorted({r.draft for r in mine}, key=lambda name: (place.get(name, len(domains)), name))
    if len(names) < 2 or len(domains) < 2:
        return None
    found = _sums(mine)
    shared = {s: {d: _shared(sums, names, d) for d in domains} for s, sums in found.items()}
    good = [s for s in found if sum(len(ids) >= settings.min_requests for ids in shared[s].values()) >= 2]
    if not good:
        need = f"{settings.min_requests} request{'s' * (settings.min_requests > 1)}"
        return {"why_not": f"the drafts have no chain of equal k with which all of them answered {need} in two domains"}
    own = next((_setting(r) for r in mine if r.arm == judged and is_chain(r)), None)
    if own in good:
        best, which = own, "the chosen arm's" if judged == chosen else "the judged arm's"
    else:
        best = min(good, key=lambda s: (s.draft_temperature is not None, s.k, s.draft_temperature or 0.0))
        which = "the smallest that all drafts share"
    assert best is not None
    cells = [c for d in domains for c in _column(found[best], names, d, shared[best][d], settings)]
    rule = gap if best == own else None
    about = next((r.draft for r in mine if r.arm == judged), None)
    return {
        **best._asdict(),
        "which": which,
        "batch": batch,
        "domains": domains,
        "drafts": [{"name": name, "trained_on": trained.get(name)} for name in names],
        "cells": cells,
        "sentence": _sentence(cells, names, about, rule),
    }


def _setting(row: RequestRow) -> Setting:
    return Setting(row.k, row.rule, row.draft_temperature)


def _sums(rows: Sequence[RequestRow]) -> dict[Setting, dict[tuple[str, str], Sums]]:
    """By setting, then by draft and domain: each request's accepted and proposed tokens."""
    apart: dict[tuple[Setting, str, str], list[RequestRow]] = {}
    for row in rows:
        if is_chain(row):
            apart.setdefault((_setting(row), row.draft, row.domain), []).append(row)
    found: dict[Setting, dict[tuple[str, str], Sums]] = {}
    for (setting, draft, domain), own in apart.items():
        by_request, _ = counted_cycles(own)
        found.setdefault(setting, {})[draft, domain] = {
            name: (sum(c.accepted for c in cycles), sum(c.proposed for c in cycles))
            for name, cycles in by_request.items()
        }
    return found


def _shared(sums: Mapping[tuple[str, str], Sums], names: Sequence[str], domain: str) -> list[str]:
    """Requests of a domain that every draft answered, with proposals that count."""
    first, *rest = ({i for i, (_, proposed) in sums.get((name, domain), {}).items() if proposed} for name in names)
    return sorted(first.intersection(*rest))


def _column(
    sums: Mapping[tuple[str, str], Sums], names: Sequence[str], domain: str, ids: Sequence[str], settings: Settings
) -> list[dict[str, Any]]:
    """One domain: every draft's alpha, and what it loses against the best of them."""
    empty = dict.fromkeys(("alpha", "low", "high", "lost", "lost_low", "lost_high"))
    blank: list[dict[str, Any]] = [
        {"draft": name, "domain": domain, "num_requests": len(ids), **empty, "best": False, "level": False}
        for name in names
    ]
    pairs = {
        name: ([sums[name, domain][i][0] for i in ids], [sums[name, domain][i][1] for i in ids])
        for name in names if (name, domain) in sums
    }  # fmt: skip
    if len(ids) < settings.min_requests:
        return blank
    alpha = {name: sum(above) / sum(below) for name, (above, below) in pairs.items()}
    top = max(names, key=lambda name: alpha[name])
    how = settings.bootstrap, settings.seed
    for cell in blank:
        name = cell["draft"]
        low, high = ratio_interval(*pairs[name], *how) or (None, None)
        cell |= {"alpha": alpha[name], "low": low, "high": high, "best": alpha[name] == alpha[top]}
        cell["lost"] = alpha[top] - alpha[name]
        if not cell["best"]:
            under, over = paired_difference_interval(pairs[top], pairs[name], *how) or (None, None)
            cell |= {"lost_low": under, "lost_high": over, "level": under is None or under <= 0.0}
    return blank


def points(value: float) -> str:
    """A difference of acceptance: 0.142 -> "14.2"."""
    return f"{100 * value:.1f}"


def lost_words(cell: Mapping[str, Any]) -> str:
    """Under a cell's alpha: "best", "14.2 points less (11.0 to 17.1)", or that no difference was shown."""
    if cell["alpha"] is None:
        return f"{cell['num_requests']} shared"
    if cell["best"]:
        return "best"
    span = f" ({points(cell['lost_low'])} to {points(cell['lost_high'])})" if cell["lost_low"] is not None else ""
    return f"{'level: ' * cell['level']}{points(cell['lost'])} points less{span}"


def _sentence(
    cells: Sequence[Mapping[str, Any]], names: Sequence[str], about: str | None, gap: tuple[str, float] | None
) -> str:
    """What one draft for all domains loses where another is better; what the rule on the domain gap counts on."""
    known = [c for c in cells if c["alpha"] is not None]
    best = {c["domain"]: c for c in reversed(known) if c["best"]}
    mean = {name: fmean(c["alpha"] for c in known if c["draft"] == name) for name in names}
    # The draft that the verdict is about, so that both speak of the same one.
    name = about if about in mean else max(names, key=lambda name: mean[name])
    mine = {c["domain"]: c for c in known if c["draft"] == name}
    one = plain(name, 40)
    surely = [c for c in mine.values() if not c["best"] and not c["level"]]
    level = [plain(c["domain"], 24) for c in mine.values() if c["level"]]
    if not surely:
        said = f"One draft for all domains, {one}: no other draft that was measured surely accepts more in any of them."
    else:
        costs = ", ".join(
            f"{points(c['lost'])} points on {plain(c['domain'], 24)} ({points(c['lost_low'])} to "
            f"{points(c['lost_high'])}, against {plain(best[c['domain']]['draft'], 40)})"
            for c in surely
        )
        each, ahead = fmean(c["alpha"] for c in best.values()), {c["draft"] for c in best.values()}
        said = f"One draft for all domains, {one}, costs acceptance: {costs}. "
        if len(ahead) == 1:
            said += f"The best of every domain is one draft, {plain(min(ahead), 40)}: none needs one of its own."
        else:
            said += f"Per-domain drafts, the best of each column, accept {each:.2f} on the mean of the domains, "
            said += f"{one} {mean[name]:.2f}."
    if level:
        said += f" No difference to the best was shown on {', '.join(level)}."
    if gap is not None and gap[0] in mine:
        worst, fall = mine[gap[0]], gap[1]
        if worst["best"]:
            won = "of these drafts none accepts more there"
        else:
            won = f"the best of these drafts there wins back {points(worst['lost'])}"
            won += ", which may be chance" * worst["level"]
        said += (
            f" On {plain(gap[0], 24)} its acceptance lies {points(fall)} points under that on its own domain, and the "
            f"rule's remedy, a draft for each domain, counts on all of them: {won}."
        )
    return said


def setting_words(found: Mapping[str, Any]) -> str:
    """At which setting the drafts are compared, and why there."""
    warm = "" if found["draft_temperature"] is None else f", drafts at {found['draft_temperature']:g}"
    rule = "" if found["rule"] == "token" else f", {found['rule']} rule"
    return f"k = {found['k']} ({found['which']}){rule}{warm}, batch {found['batch']}"


def matrix_table(report: Report) -> list[dict[str, Any]]:
    """Rows of the table: {name, trained_on, cells}, cells in the order of the domains; empty without a matrix."""
    found = report.get("matrix") or {}  # reports from before it was made have none
    return [
        {**draft, "cells": [c for c in found["cells"] if c["draft"] == draft["name"]]}
        for draft in found.get("drafts", [])
    ]


def _shade(part: float) -> tuple[float, float, float]:
    """From near white to a blue on which dark text can still be read (contrast 4.5 at least)."""
    weight = 0.06 + 0.62 * part
    red, green, blue = (1 - weight + weight * channel for channel in to_rgb(BLUE))
    return red, green, blue


def draw_matrix(report: Report) -> Figure | None:
    """Drafts by domains; None without a matrix."""
    lines = matrix_table(report)
    if not lines:
        return None
    found = report["matrix"]
    domains, cells = found["domains"], found["cells"]
    trained = {d["name"]: d["trained_on"] for d in found["drafts"]}
    table = [{"draft": c["draft"], "trained_on": trained[c["draft"]] or "", "k": found["k"], **c} for c in cells]
    known = [c["alpha"] for c in cells if c["alpha"] is not None]
    low, high = min(known) - 0.05, max(known)

    def draw(ax: Axes) -> None:
        wide, small = len(domains) <= 4, 8 if len(domains) < 4 else 7  # of more there is room for alpha and mark only
        for y, line in enumerate(lines):
            for x, c in enumerate(line["cells"]):
                told = c["alpha"] is not None
                colour = _shade((c["alpha"] - low) / (high - low)) if told else "#F6F7F9"
                ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", lw=2))
                weight = "bold" if c["best"] else "normal"
                ax.text(x, y - 0.2, number(c["alpha"]), ha="center", va="center", fontsize=10, weight=weight)
                if wide and told:
                    ax.text(x, y + 0.08, interval(c["low"], c["high"]), ha="center", va="center", fontsize=small)
                mark = "" if not told else "best" if c["best"] else f"−{points(c['lost'])}" + " level" * c["level"]
                ax.text(x, y + 0.31, mark, ha="center", va="center", fontsize=small, weight=weight)
                if c["best"]:
                    ax.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=INK, lw=1.4))
        ax.set_xlim(-0.5, len(domains) - 0.5)
        ax.set_ylim(len(lines) - 0.5, -0.5)
        ax.set_xticks(range(len(domains)), [plain(d, 14) for d in domains])
        ax.xaxis.tick_top()
        labels = [
            "\n".join(wrap(plain(r["name"], 32), 16) + [f"for {plain(r['trained_on'], 12)}"] * bool(r["trained_on"]))
            for r in lines
        ]
        ax.set_yticks(range(len(lines)), labels, fontsize=7)
        ax.spines[:].set_visible(False)
        ax.grid(visible=False)

    caption = (
        f"alpha at {setting_words(found)}, over the requests that all drafts answered; under it the 95% interval, and "
        "the points that it lies under the best of its column; level: the paired interval of that loss holds 0."
    )
    return make_figure("matrix", TITLE, caption, table, draw, height=0.4 + 0.62 * len(lines))
