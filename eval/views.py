"""Parts of a report that several outputs show: the judged arm, its domains, the bars. Reads report.json's dict only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval import show
from eval.cells import Cell
from eval.choice import judged_pool
from eval.records import ALL, LOOKUP, PHASES, arm_name

Report = Mapping[str, Any]
# Settings of an arm beside draft and k, and what they are where a report does not say.
SETTINGS: Mapping[str, Any] = {"rule": "token", "draft_temperature": None}


def words(draft: str) -> str:
    """A draft's name for people."""
    return "prompt look-up" if draft == LOOKUP else draft


def arm_label(cell: Mapping[str, Any], limit: int = 36) -> str:
    """An arm in words: "code-5pct, k = 3"; a long name is cut, k never."""
    if not cell["k"]:
        return "no speculation"
    if cell.get("label") and cell["arm"] != arm_name(cell["draft"], cell["k"]):
        return show.plain(cell["label"], limit + 12)
    return f"{show.plain(words(cell['draft']), limit)}, k = {cell['k']}"


def is_chain(cell: Mapping[str, Any]) -> bool:
    """Whether an arm drafts a fixed k and sees the whole text (`records.is_chain`): of a cell or a ranking's entry."""
    # Reports from before this was written down named such arms, and only them, by draft and k alone.
    return bool(cell.get("chain", bool(cell["k"]) and cell["arm"] == arm_name(cell["draft"], cell["k"])))


def same_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two cells accept by the same rule and draft at the same temperature: what k may be compared over."""
    return all(one.get(name, plain) == other.get(name, plain) for name, plain in SETTINGS.items())


def load_label(cell: Mapping[str, Any]) -> str:
    """A load in a figure: context group, its typical context, batch."""
    group = "all contexts" if cell["group"] == ALL else show.plain(cell["group"], 12)
    return f"{group} ({cell['context_tok']['p50']:,.0f}), B = {cell['batch']}"


def loads(report: Report, arm: str | None) -> list[Cell]:
    """Cells of one arm in the judged domain, one for each context group and batch, shortest context first.

    Groups pooled together are left out where there are several.
    """
    here = overall_cells(report)
    domain = here[0]["domain"] if here else ALL
    mine = [c for c in report["cells"] if c["arm"] == arm and c["domain"] == domain and c["status"] == "ok"]
    apart = [c for c in mine if c["group"] != ALL]
    return sorted(apart or mine, key=lambda c: (c["batch"], c["context_tok"]["p50"]))


def draft_names(report: Report) -> list[str]:
    """Drafts that were measured, look-up last."""
    names = {c["draft"] for c in report["cells"] if c["k"]}
    return sorted(names, key=lambda name: (name == LOOKUP, name))


def overall_cells(report: Report) -> list[Cell]:
    """The cells of the domain that is judged (or of all together), the baseline first."""
    return sorted(
        judged_pool(report["cells"], report["settings"]["objective"], report["settings"]["domain"]),
        key=lambda c: (c["k"] > 0, c["draft"], c["k"]),
    )


def judged_cell(report: Report) -> Cell | None:
    """The arm that the verdict is about, in the domain that is judged."""
    return next((c for c in overall_cells(report) if c["arm"] == report["verdict"]["arm"]), None)


def baseline_cell(report: Report) -> Cell | None:
    """k = 0 in the domain that is judged."""
    return next((c for c in overall_cells(report) if c["k"] == 0), None)


def ladder(report: Report, which: str) -> list[Cell]:
    """Cells of the judged draft by domain, the pooled one last.

    Args:
        report: the report.
        which: "judged" takes the judged k; "longest" the largest k that was measured, which shows the most positions.
    """
    judged = judged_cell(report)
    if judged is None:
        return []
    mine = [
        c
        for c in report["cells"]
        if c["draft"] == judged["draft"] and c["group"] == judged["group"] and c["batch"] == judged["batch"]
    ]
    longest = max((c for c in mine if is_chain(c) and same_settings(c, judged)), key=lambda c: c["k"], default=judged)
    arm = judged["arm"] if which == "judged" else longest["arm"]
    chosen = [c for c in mine if c["arm"] == arm and c["status"] == "ok"]
    return sorted(chosen, key=lambda c: c["domain"] == ALL)


def share_bars(report: Report) -> list[dict[str, Any]]:
    """Decode milliseconds a token by phase: the baseline, the judged arm, and the best of each other kind."""
    cells = {c["arm"]: c for c in overall_cells(report)}
    wanted = [c["arm"] for c in cells.values() if c["k"] == 0]
    seen = set()
    judged = report["verdict"]["arm"]
    for entry in sorted(report["choice"]["ranking"], key=lambda c: (c["arm"] != judged, -c["value"])):
        if entry["k"] and entry["draft"] not in seen:
            seen.add(entry["draft"])
            wanted.append(entry["arm"])
    bars = []
    for arm in wanted:
        cell = cells[arm]
        share, total = cell["share"], cell["decode_ms_per_tok"]
        if not share or not total:
            continue
        bar: dict[str, Any] = {"arm": arm, "label": arm_label(cell, 22), "total_ms_per_tok": total}
        for name in PHASES:
            bar[f"{name}_share"], bar[f"{name}_ms_per_tok"] = share[name], share[name] * total
        bars.append(bar | {"prefix_kv_share": share["prefix_kv"], "waste_share": share["waste"]})
    return bars


def schedule(report: Report) -> list[list[str]]:
    """The judged draft's k by load, as a table of text with its head first; empty where there is only one load.

    A line is a domain and batch, a column a context group: k (off where no k is faster than none), the speedup of the
    best k with its interval, and how many requests say so.
    """
    judged = judged_cell(report)
    entries = report["schedule"].get(judged["draft"], []) if judged else []
    if len({(e["domain"], e["group"], e["batch"]) for e in entries if e["domain"]}) < 2:
        return []
    longest: dict[str, int] = {}
    for e in entries:
        longest[e["group"]] = max(longest.get(e["group"], 0), e["context_tok"])
    groups = sorted(longest, key=lambda group: longest[group])
    rows = [["domain", "batch", *("all contexts" if g == ALL else f"{g}, to {longest[g]:,} tokens" for g in groups)]]
    for domain, batch in dict.fromkeys((e["domain"], e["batch"]) for e in entries):
        here = {e["group"]: e for e in entries if (e["domain"], e["batch"]) == (domain, batch)}
        cells = [
            f"{'k = ' + str(e['k']) if e['k'] else 'off'} ({show.speed(e['value'])}, "
            f"{show.interval(e['low'], e['high'])}, {e['num_requests']})"
            if e
            else ""
            for e in (here.get(group) for group in groups)
        ]
        rows.append([domain or "any other, or mixed", str(batch), *cells])
    return rows


def headroom(report: Report) -> list[dict[str, Any]]:
    """The judged arm's decode time by part, the largest first: ms a token, share, and 1 / (1 - share).

    Prefix KV (inside verify) and waste are cross-cuts: they stand last and are not added to the phases.
    """
    cell = judged_cell(report)
    if cell is None or not cell["share"]:
        return []
    phases = sorted(PHASES, key=lambda name: -cell["share"][name])
    crosscuts = [("prefix_kv", "prefix KV, inside verify"), ("waste", "waste on rejected tokens, across")]
    return [
        {
            "phase": label,
            "share": share,
            "ms_per_tok": share * cell["decode_ms_per_tok"],
            "headroom": 1 / (1 - share) if share < 1 else None,
        }
        for name, label in [*((name, name) for name in phases), *crosscuts]
        if (share := cell["share"][name]) is not None
    ]


def shift(report: Report) -> str:
    """How far acceptance falls from the training domain to the worst; "" where one of them was not measured."""
    apart = [c for c in ladder(report, "judged") if c["domain"] != ALL and c["alpha"] is not None]
    here = next((c for c in apart if c["domain"] == report["settings"]["domain"]), None)
    worst = min(apart, key=lambda c: c["alpha"], default=None)
    if here is None or worst is None or worst is here:
        return ""
    figures = [f"{show.number(c['alpha'])} (tau {show.number(c['tau'])}) on {show.plain(c['domain'], 30)}"
               for c in (here, worst)]  # fmt: skip
    return f"Shift: alpha is {figures[0]}, which the draft was trained on, and {figures[1]}, the worst."


def domain_name(name: str) -> str:
    """A domain in a table."""
    return "all domains" if name == ALL else name


def ordered_cells(report: Report) -> list[Cell]:
    """Cells as the full table shows them: by batch and group, pooled domains first, the baseline on top."""
    return sorted(
        report["cells"],
        key=lambda c: (
            c["batch"],
            c["group"] != ALL,
            c["group"],
            c["domain"] != ALL,
            c["domain"],
            c["k"] > 0,
            c["draft"] == LOOKUP,
            c["draft"],
            c["k"],
        ),
    )


def key_figures(report: Report) -> list[tuple[str, str, str]]:
    """(name, value, note) of what is read first; empty where nothing was judged."""
    cell, base = judged_cell(report), baseline_cell(report)
    if cell is None or base is None:
        return []
    entry = next(c for c in report["choice"]["ranking"] if c["arm"] == cell["arm"])
    plain = next(c for c in report["choice"]["ranking"] if not c["k"])
    size: Mapping[str, Any] = next((d for d in report["drafts"] if d["name"] == cell["draft"]), {})
    figures = [
        (
            "End-to-end speedup",
            show.speed(entry["value"]),
            f"{show.interval(entry['low'], entry['high'])}, {report['choice']['objective']}",
        ),
        (
            "Decode time a token, all requests",
            f"{show.ms(cell['decode_ms_per_tok'])} ms",
            f"baseline {show.ms(base['decode_ms_per_tok'])} ms",
        ),
        _request_time(entry, plain),
        ("Requests made slower", show.percent(cell["slower_frac"]), f"of {cell['num_requests']}"),
        ("Tokens a cycle, tau", show.number(cell["tau"]), f"at most {cell['k'] + 1}"),
        ("Acceptance, alpha", show.number(cell["alpha"]), _margin(cell)),
        ("Throughput speedup", show.speed(cell["throughput_speedup"]), _memory(cell)),
        ("Ceiling, all requests", show.speed(cell["ceiling"]), _realised(cell["realised_frac"])),
    ]
    if "stored_params" in size:
        note = f"{show.compact(size.get('read_params'))} read a token"
        figures.append(("Draft parameters", show.compact(size["stored_params"]), note))
    return figures


def _request_time(entry: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[str, str, str]:
    """End-to-end time at p95, or at p50 where there are too few requests for a p95."""
    if p95(entry) and p95(plain):
        return "p95 request time", f"{show.ms(p95(entry))} ms", f"baseline {show.ms(p95(plain))} ms"
    ours, base = ((c["e2e_ms"] or {}).get("p50") for c in (entry, plain))
    return "p50 request time", f"{show.ms(ours)} ms", f"baseline {show.ms(base)} ms"


def p95(entry: Mapping[str, Any]) -> float | None:
    """A ranked arm's p95 end-to-end time over the common requests; None where these are too few for one."""
    return entry["e2e_p95_ms"] if (entry["e2e_ms"] or {}).get("p95") else None


def _margin(cell: Mapping[str, Any]) -> str:
    """Break-even, and how far acceptance lies above it."""
    even, alpha = cell["alpha_break_even"], cell["alpha"]
    above = f", margin {alpha - even:+.2f}" if even is not None and alpha is not None else ""
    return f"break-even {show.number(even)}, all requests{above}"


def _memory(cell: Mapping[str, Any]) -> str:
    """Throughput at equal memory, with the batch."""
    return f"batch {cell['batch']}; at equal memory {show.equal_memory(cell['throughput_speedup_equal_memory'])}"


def _realised(frac: float | None) -> str:
    if frac is None:
        return "not known of this arm"
    return "none of its gain realised" if frac <= 0 else f"{show.percent(frac)} of its gain realised"


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, text); a bare value has an empty key."""
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list | tuple):
        return [(prefix, ", ".join("null" if v is None else show.plain(v, 200) for v in value))]
    return [(prefix, "null" if value is None else show.plain(value, 600))]  # a command may be long


def struck(error: Mapping[str, Any]) -> tuple[str, str]:
    """Requests and arms that a failure struck, the first few by name."""

    def some(names: list[str]) -> str:
        first = ", ".join(show.plain(name, 40) for name in names[:3])
        return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"

    return some(error["requests"]), some(error["arms"])
