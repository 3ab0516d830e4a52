"""The report as text for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval import show
from eval.definitions import DEFINITIONS
from eval.matrix import TITLE, lost_words, matrix_table, setting_words
from eval.notes import notes, trust
from eval.predict import NOTHING_HELD
from eval.records import ALL
from eval.show import safe, table
from eval.views import (
    Report,
    arm_label,
    domain_name,
    flat,
    headroom,
    judged_cell,
    key_figures,
    ladder,
    loads,
    schedule,
    share_bars,
    struck,
)

STATUS = {"go": "GO", "no-go": "NO-GO", "insufficient": "INSUFFICIENT", "simulated": "SIMULATED"}


def render_markdown(report: Report) -> str:
    """Verdict, reasons, choice, domains, shares and provenance in Markdown.

    Args:
        report: of `report.build_report`.

    Returns:
        text that ends in a newline.
    """
    verdict = report["verdict"]
    lines = [f"# {STATUS[verdict['status']]}: {safe(verdict['headline'], 600)}", ""]
    lines += [*(f"- {safe(notice, 400)}" for notice in verdict["notices"]), ""] if verdict["notices"] else []
    target = report["target"]
    name = target.get("name", "") if isinstance(target, dict) else target
    load = f"{report['counts']['requests']} requests measured"
    if verdict["arm"]:
        batch = (judged_cell(report) or {}).get("batch")
        load = f"verdict on {verdict['num_requests']} of {load}" + (f", at batch {batch}" if batch else "")
    lines += [" · ".join(x for x in (safe(name), safe(show.plain(_words(report["device"]))), load) if x), ""]
    lines += (
        table(["figure", "value", ""], [(safe(a), safe(b), safe(c)) for a, b, c in key_figures(report)])
        if key_figures(report)
        else []
    )
    if report["simulated"]:
        lines += ["## Simulated against predicted", "", *_simulated(report["simulated"])]
    lines += ["## Reasons", "", *_reasons(report)]
    tallest = verdict["tallest"]
    if tallest:
        lines += [f"The tallest bar is **{tallest['phase']}**, {show.percent(tallest['share'])} of decode time.", ""]
    if report["choice"]["ranking"]:
        lines += ["## Ranking", "", *_ranking(report), *(f"- {safe(note, 600)}" for note in notes(report)), ""]
    cells = [c for c in ladder(report, "judged") if c["latency_speedup"]]
    if cells:
        lines += [f"## {safe(arm_label(cells[0]))} by domain", "", *_domains(cells)]
    lines += _matrix(report)
    apart = [c for c in loads(report, verdict["arm"]) if c["latency_speedup"]]
    if len(apart) > 1:
        lines += ["## By load", "", *_domains(apart)]
    if len(report["choice"]["by_load"]) > 1:
        lines += ["## The fastest arm by load", "", *_fastest(report)]
    planned = schedule(report)
    if planned:
        rows_of = [[safe(x) for x in row] for row in planned]
        about = (
            "The best k of the judged draft at each load, beside no other arm: speedup of that k, its 95% interval, "
            "requests. Off: no k was faster than none. A context up to twice the longest measured counts to its group."
        )
        lines += ["## k by domain and load", "", about, "", *table(rows_of[0], rows_of[1:])]
    bars = share_bars(report)
    if bars:
        lines += ["## Where the time goes", "", *_shares(bars)]
    rooms = headroom(report)
    if rooms:
        rows = [(r["phase"], show.ms(r["ms_per_tok"]), show.percent(r["share"], 1), show.speed(r["headroom"]))
                for r in rooms]  # fmt: skip
        head = ["of the judged arm", "ms a token", "share", "decoding would be faster without it by"]
        lines += table(head, rows)
        lines += table(
            [
                "batch",
                "not explained by the phases (bar 2%)",
                "phase clock over bare (bar 2%)",
                "spread of the baseline",
            ],
            [(str(t["batch"]), t["closure"], safe(t["clocks"]), t["noise"]) for t in trust(report)],
        )
    if report["against"]:
        lines += ["## Before and after", "", safe(report["against"]["sentence"], 1200), ""]
    lines += _model(report)
    if report["errors"]:
        lines += ["## Failed rows", ""]
        lines += table(
            ["reason", "rows", "requests", "arms"],
            [(safe(e["error"], 200), str(e["num_rows"]), *(safe(t, 200) for t in struck(e))) for e in report["errors"]],
        )
    lines += ["## Words", "", *(f"- **{safe(term)}**: {safe(text, 300)}" for term, text in DEFINITIONS), ""]
    lines += ["## Provenance", "", *(f"- {safe(key)}: {safe(value, 600)}" for key, value in flat(report["provenance"]))]
    return "\n".join(lines) + "\n"


def _simulated(found: dict[str, Any]) -> list[str]:
    rows = [
        (
            safe(c["label"]), safe(domain_name(c["domain"])), show.number(c["context_tok"], 0), str(c["batch"]),
            show.number(c["new_tok"], 0), str(c["num_requests"]), show.number(c["expected_tau"]), show.number(c["tau"]),
            show.speed(c["predicted"]), show.speed(c["measured"]), show.percent(c["error_frac"], 1),
        )
        for c in found["cells"]
    ]  # fmt: skip
    head = ["arm", "domain", *LOAD, "tau by the rates", "tau", "predicted", "measured", "error"]
    mean, bar = show.percent(found["mean_abs_error_frac"], 1), show.percent(found["bar_frac"])
    return [*table(head, rows), f"Mean absolute error {mean}; the bar is {bar}.", ""]


def _words(value: Any) -> str:
    return ", ".join(text for _, text in flat(value))


def _reasons(report: Report) -> list[str]:
    rows = []
    for r in report["verdict"]["reasons"]:
        mark = ("pass" if r["passed"] else "**FAIL**") if r["decides"] else "advice"
        bound = f"{r['passes']} {show.figure(r['threshold'], r['unit'])}"
        remedies = "; ".join(f"{m['remedy']} {show.gain(m['predicted_gain'])}".strip() for m in r["remedies"])
        rows.append((mark, r["rule"], show.figure(r["figure"], r["unit"]), bound, remedies))
    return table(
        ["", "rule", "figure", "wanted", "remedies, each with the speedup it is predicted to add"],
        [(row[0], *(safe(text, 500).replace("\\>", ">").replace("\\<", "<") for text in row[1:])) for row in rows],
    )


def _matrix(report: Report) -> list[str]:
    """Acceptance by draft and domain; nothing where it was not compared."""
    found = report.get("matrix")
    if not found:
        return []
    if "why_not" in found:
        return [f"## {TITLE}", "", f"n/a: {safe(found['why_not'], 300)}.", ""]
    rows = [
        (
            safe(line["name"]) + (f", for {safe(line['trained_on'])}" if line["trained_on"] else ""),
            *(
                f"{show.number(c['alpha'])} ({show.interval(c['low'], c['high'])}), {lost_words(c)}"
                for c in line["cells"]
            ),
        )
        for line in matrix_table(report)
    ]
    head = ["draft", *(safe(domain) for domain in found["domains"])]
    about = f"alpha (95% interval) at {setting_words(found)}, over the requests that all drafts answered."
    return [f"## {TITLE}", "", safe(about, 300), "", *table(head, rows), safe(found["sentence"], 1500), ""]


LOAD = ("prompt", "batch", "answer", "requests")
TIMES = ("TTFT p50/p95", "TPOT p50/p95", "E2E p50/p95")
STORIES = ("latency", "95% interval", "slower", "throughput", "at equal memory", "tok/s", *TIMES)


def _two(times: dict[str, float] | None) -> str:
    return f"{show.ms(times['p50'])} / {show.ms(times['p95'])}" if times else show.NA


def _times(c: dict[str, Any]) -> tuple[str, ...]:
    return tuple(_two(c[name]) for name in ("ttft_ms", "tpot_ms", "e2e_ms"))


def _ranking(report: Report) -> list[str]:
    rows = []
    for c in report["choice"]["ranking"]:
        mark = " **chosen**" if c["arm"] == report["choice"]["arm"] else ""
        load = c["load"] or dict.fromkeys(("context_tok", "batch", "new_tok", "num_requests"))
        rows.append(
            (
                safe(arm_label(c)) + mark, show.number(load["context_tok"], 0), show.number(load["batch"], 0),
                show.number(load["new_tok"], 0), show.number(load["num_requests"], 0), show.speed(c["value"]),
                show.interval(c["low"], c["high"]) if c["k"] else "", show.percent(c["slower_frac"]) if c["k"] else "",
                show.speed(c["throughput_speedup"]) if c["k"] else "1.00x",
                show.equal_memory(c["equal_memory"]) if c["k"] else "1.00x", show.number(c["tok_s"], 1), *_times(c),
                show.number(c["alpha"]), show.number(c["tau"]),
            )
        )  # fmt: skip
    return table(["arm", *LOAD, *STORIES, "alpha", "tau"], rows)


def _domains(cells: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for c in cells:
        s = c["latency_speedup"]
        where = domain_name(c["domain"]) if c["group"] == ALL else f"{domain_name(c['domain'])}, {c['group']}"
        rows.append(
            (
                safe(where), show.number(c["context_tok"]["p50"], 0), str(c["batch"]),
                show.number(c["new_tok"]["p50"], 0), str(c["num_requests"]), show.speed(s["p50"]),
                show.interval(s["ci_low"], s["ci_high"]), show.percent(c["slower_frac"]),
                show.speed(c["throughput_speedup"]), show.equal_memory(c["throughput_speedup_equal_memory"]),
                show.number(c["throughput_tok_s"], 1), *_times(c),
                show.number(c["alpha"]), show.number(c["tau"]), show.number(c["alpha_break_even"]),
                show.speed(c["ceiling"]), show.speed(s["total"]), show.speed(c["predicted_speedup"]),
            )
        )  # fmt: skip
    return table(["domain", *LOAD, *STORIES, "alpha", "tau", "break-even", "ceiling", "total", "predicted"], rows)


def _fastest(report: Report) -> list[str]:
    """At each context group and batch the fastest arm for one request, and the one with most tokens a second."""

    def best(found: dict[str, Any]) -> tuple[str, str]:
        if found["value"] is None:
            return show.NA, show.NA
        return safe(arm_label(found)), show.speed(found["value"]) if found["k"] else "1.00x"

    rows = [
        (
            "all contexts" if e["group"] == ALL else safe(e["group"]), show.number(e["context_tok"], 0),
            str(e["batch"]), str(e["num_requests"]), *best(e["latency"]), show.speed(e["chosen_latency"]),
            *best(e["throughput"]), show.speed(e["chosen_throughput"]),
        )
        for e in report["choice"]["by_load"]
    ]  # fmt: skip
    head = ["context", "prompt", "batch", "requests", "fastest request", "latency", "the chosen arm's"]
    return table([*head, "most tokens", "throughput", "the chosen arm's"], rows)


def _model(report: Report) -> list[str]:
    """What-ifs, ceilings by load, the model's error and the prefix KV estimates."""
    model, lines = report["model"], []
    if model.get("not_described"):
        lines += ["## What if", "", f"n/a: {safe(model['not_described'], 300)}.", ""]
    asked = [w for w in model["what_if"] if w["speedup"] is not None]
    if asked:
        rows = [
            (
                safe(w["what"]), show.speed(w["speedup"]), show.gain(w["gain_frac"]) if i else "",
                str(w["best_k"] or "off"), show.speed(w["best_speedup"]), show.speed(w["ceiling"]),
                "none pays" if w["alpha_break_even"] is None else show.number(w["alpha_break_even"]),
                "" if w["measured_load"] else "outside the measured loads",
            )
            for i, w in enumerate(asked)
        ]  # fmt: skip
        head = ["if", "speedup", "change", "best k, predicted", "speedup there", "ceiling", "break-even alpha", ""]
        about = (
            f"One request of {show.medians(asked[0])}, the medians of what was measured, by the cost model; in a batch "
            "one of steady work, in which each row that ends makes room for a prompt."
        )
        lines += ["## What if", "", about, "", *table(head, rows)]
        silent = [w for w in model["what_if"] if w["why_not"]]
        if silent:
            named = "; ".join(safe(w["what"]) for w in silent)
            lines += [f"Not answered: {named}: {safe(silent[0]['why_not'], 300)}.", ""]
    if model["held_out"]["schemes"]:
        errors = [
            (
                safe(name), str(e["num_cells"]), show.percent(e["mean_abs_error_frac"], 1),
                show.percent(e["worst_frac"], 1), safe(e["meaning"], 200),
            )
            for name, e in model["held_out"]["schemes"].items()
        ]  # fmt: skip
        head = ["left out of the fit", "cells", "mean abs. error", "worst", "meaning"]
        lines += ["## Prediction against measurement", "", *table(head, errors)]
    else:
        lines += ["## Prediction against measurement", "", f"n/a: {NOTHING_HELD}.", ""]
    if model["prefix_kv"]:
        three = [
            (
                p["of"], safe(p["draft"], 36), show.number(p["context"]), str(p["batch"]), show.ms(p["fit_ms"]),
                show.ms(p["difference_ms"]), show.ms(p["bandwidth_ms"]), show.percent(p["share_frac"], 1),
                show.percent(p["spread_frac"]), "agree" if p["reliable"] else "**differ**",
            )
            for p in model["prefix_kv"]
        ]  # fmt: skip
        head = ["of one", "draft", "context", "batch", "c2 x tokens, ms", "difference, ms", "bytes, ms", "share"]
        lines += ["## Prefix KV, three ways", "", *table([*head, "spread", "15% bar"], three)]
    return lines


def _shares(bars: Sequence[dict[str, Any]]) -> list[str]:
    names = ("draft", "verify", "sampling", "host", "prefix_kv", "waste")
    rows = [
        (safe(b["label"]), show.ms(b["total_ms_per_tok"]), *(show.percent(b[f"{n}_share"]) for n in names))
        for b in bars
    ]
    return table(["arm", "decode ms a token", "draft", "verify", "sampling", "host", "prefix KV", "waste"], rows)
