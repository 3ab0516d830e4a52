"""The report as text for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from eval import show
from eval.definitions import DEFINITIONS
from eval.views import Report, arm_label, domain_name, flat, key_figures, ladder, notes, share_bars, struck

STATUS = {"go": "GO", "no-go": "NO-GO", "insufficient": "INSUFFICIENT"}


def safe(text: Any, limit: int = 120) -> str:
    """Text from outside as one line that no Markdown reader interprets."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", show.plain(text, limit)).replace("&", "&amp;")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; cells are already safe."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def render_markdown(report: Report) -> str:
    """Verdict, reasons, choice, domains, shares and provenance in Markdown.

    Args:
        report: of `report.build_report`.

    Returns:
        text that ends in a newline.
    """
    verdict = report["verdict"]
    lines = [f"# {STATUS[verdict['status']]}: {safe(verdict['headline'], 400)}", ""]
    target = report["target"]
    name = target.get("name", "") if isinstance(target, dict) else target
    load = f"{report['counts']['requests']} requests"
    lines += [" · ".join(x for x in (safe(name), safe(show.plain(_words(report["device"]))), load) if x), ""]
    lines += (
        table(["figure", "value", ""], [(safe(a), safe(b), safe(c)) for a, b, c in key_figures(report)])
        if key_figures(report)
        else []
    )
    lines += ["## Reasons", "", *_reasons(report)]
    if report["choice"]["ranking"]:
        lines += ["## Ranking", "", *_ranking(report), *(f"- {safe(note, 600)}" for note in notes(report)), ""]
    cells = [c for c in ladder(report, "judged") if c["latency_speedup"]]
    if cells:
        lines += [f"## {safe(arm_label(cells[0]))} by domain", "", *_domains(cells)]
    bars = share_bars(report)
    if bars:
        lines += ["## Where the time goes", "", *_shares(bars)]
    if report["errors"]:
        lines += ["## Failed rows", ""]
        lines += table(
            ["reason", "rows", "requests", "arms"],
            [(safe(e["error"], 200), str(e["num_rows"]), *(safe(t, 200) for t in struck(e))) for e in report["errors"]],
        )
    lines += ["## Words", "", *(f"- **{safe(term)}**: {safe(text, 300)}" for term, text in DEFINITIONS), ""]
    lines += ["## Provenance", "", *(f"- {safe(key)}: {safe(value, 200)}" for key, value in flat(report["provenance"]))]
    return "\n".join(lines) + "\n"


def _words(value: Any) -> str:
    return ", ".join(text for _, text in flat(value))


def _reasons(report: Report) -> list[str]:
    rows = []
    for r in report["verdict"]["reasons"]:
        mark = ("pass" if r["passed"] else "**FAIL**") if r["decides"] else "advice"
        bound = f"{r['passes']} {show.figure(r['threshold'], r['unit'])}"
        rows.append(
            (mark, r["rule"], show.figure(r["figure"], r["unit"]), bound, r["remedy"], show.gain(r["predicted_gain"]))
        )
    return table(
        ["", "rule", "figure", "wanted", "remedy", "predicted gain"],
        [(row[0], *(safe(text, 200).replace("\\>", ">").replace("\\<", "<") for text in row[1:])) for row in rows],
    )


def _ranking(report: Report) -> list[str]:
    rows = []
    for c in report["choice"]["ranking"]:
        mark = "**chosen**" if c["arm"] == report["choice"]["arm"] else ""
        rows.append(
            (
                safe(arm_label(c)), show.speed(c["value"]), show.interval(c["low"], c["high"]),
                show.ms(c["e2e_p95_ms"]), show.number(c["alpha"]), show.number(c["tau"]), mark,
            )
        )  # fmt: skip
    return table(["arm", "speedup", "95% interval", "p95 request ms", "alpha", "tau", ""], rows)


def _domains(cells: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for c in cells:
        s = c["latency_speedup"]
        rows.append(
            (
                safe(domain_name(c["domain"])), str(c["num_requests"]), show.number(c["context_tok"]["p50"], 0),
                str(c["batch"]), show.number(c["new_tok"]["p50"], 0), show.speed(s["p50"]),
                show.interval(s["ci_low"], s["ci_high"]), show.speed(s["p5"]), show.percent(c["slower_frac"]),
                show.number(c["alpha"]), show.number(c["tau"]), show.number(c["alpha_break_even"]),
                show.speed(c["predicted_speedup"]), show.speed(c["throughput_speedup"]),
            )
        )  # fmt: skip
    return table(
        [
            "domain", "requests", "context", "batch", "new tokens", "speedup p50", "95% interval", "p5", "slower",
            "alpha", "tau", "break-even", "predicted", "throughput",
        ],
        rows,
    )  # fmt: skip


def _shares(bars: Sequence[dict[str, Any]]) -> list[str]:
    names = ("draft", "verify", "sampling", "host", "prefix_kv", "waste")
    rows = [
        (safe(b["label"]), show.ms(b["total_ms_per_tok"]), *(show.percent(b[f"{n}_share"]) for n in names))
        for b in bars
    ]
    return table(["arm", "decode ms a token", "draft", "verify", "sampling", "host", "prefix KV", "waste"], rows)
