"""Rows -> report.json, report.md, report.html and figures/: the same facts four times. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table
from rich.text import Text

from distill.files import write_text
from eval import show
from eval.canvas import Figure
from eval.cells import Settings, build_cells, overall
from eval.choice import choose, judged_pool
from eval.definitions import DEFINITIONS
from eval.explain import explain
from eval.figures import draw_all
from eval.markdown import STATUS, render_markdown
from eval.matrix import acceptance_matrix, lost_words, matrix_table
from eval.notes import notes, trust
from eval.pauses import notice
from eval.predict import NOTHING_HELD, error_of
from eval.records import RequestRow, errors, measured
from eval.schedule import schedules
from eval.simulated import check, no_verdict, rates_of
from eval.verdict import decide, judged_arm, worst_gap
from eval.views import (
    Report,
    arm_label,
    baseline_cell,
    domain_name,
    flat,
    headroom,
    judged_cell,
    key_figures,
    ladder,
    ordered_cells,
    p95,
    schedule,
    shift,
    struck,
)

FORMAT = 3


def build_report(
    rows: Sequence[RequestRow],
    plan: Mapping[str, Any] | None,
    provenance: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that was measured and decided, as report.json holds it.

    Args:
        rows: all rows of an evaluation, warm-up and failed ones included.
        plan: plan.json, or None.
        provenance: versions, commit, seeds, command line.
        settings: those of `cells.Settings`; `target` and `device` (in words or as a mapping); `drafts`, a list of
            {name, stored_params, read_params, ...}; anything else that had effect, shown as it is.

    Returns:
        the report; JSON can hold it.

    Raises:
        ValueError: rows of real and of simulated acceptance together.
    """
    used = Settings.of(settings)
    kept = measured(rows)
    cells = build_cells(kept, plan, used)
    drafts = [dict(d) for d in settings.get("drafts", [])]
    sizes = {d["name"]: int(d.get("read_params") or d.get("stored_params") or 0) for d in drafts}
    choice = choose(cells, used, sizes, (settings.get("raced") or {}).get("dropped", ()))
    pool = judged_pool(cells, used.objective, used.domain)
    judged = overall(cells) + pool
    for cell in cells:
        # The pooled cells hold every pair already; a copy for each domain would double the file.
        if cell not in judged:
            cell["pairs"] = []
    failed = [r for r in rows if r.error is not None]
    about = judged_arm(choice)
    mine = next((c for c in pool if about and c["arm"] == about["arm"]), None)
    modelled, fitted = explain(kept, plan, cells, mine)
    rates = rates_of(kept)
    verdict = decide(
        cells,
        choice,
        used,
        len(failed),
        {d["name"]: d for d in drafts},
        fitted.surfaces.get(mine["draft"]) if mine else None,
        error_of(modelled["held_out"]),
    )
    across = None
    if rates:
        verdict = no_verdict(verdict, rates)
    elif pool:
        gap = worst_gap(verdict, cells, mine)
        across = acceptance_matrix(kept, used, pool[0]["batch"], drafts, verdict["arm"], choice["arm"], gap)
    verdict["notices"] = [*notice(settings.get("paused")), *verdict["notices"]]
    return {
        "format": FORMAT,
        "simulated": {"accept": list(rates), **check(cells, plan)} if rates else None,
        "device": settings.get("device") or sorted({r.device for r in rows}),
        "target": settings.get("target") or {},
        "drafts": drafts or [{"name": name} for name in sorted({r.draft for r in kept if r.draft})],
        "settings": {k: v for k, v in settings.items() if k not in ("device", "target", "drafts")} | asdict(used),
        "counts": {
            "rows": len(rows),
            "measured": len(kept),
            "warmup": sum(r.warmup for r in rows),
            "failed": len(failed),
            "requests": len({r.request_id for r in kept}),
            "requests_failed": len({r.request_id for r in failed}),
        },
        "errors": errors(rows),
        "cells": cells,
        "choice": choice,
        "verdict": verdict,
        "model": modelled,
        "against": None,
        "matrix": across,
        "schedule": schedules(cells, used),
        "costs": [dict(c) for c in (plan or {}).get("costs", [])],
        "provenance": dict(provenance),
    }


def write_report(folder: str | Path, report: Report) -> Path:
    """Writes figures/*.svg + .csv, report.md, report.html and, when these are whole, report.json.

    Args:
        folder: of the evaluation; made when it is absent.
        report: of `build_report`, or read back from report.json.

    Returns:
        path of report.html.

    Raises:
        ValueError: a report of another format.
    """
    if report.get("format") != FORMAT:
        raise ValueError(f"report format is {report.get('format')!r}; this version writes format {FORMAT}")
    folder = Path(folder)
    drawn = draw_all(report)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        prolog = '<?xml version="1.0" encoding="utf-8"?>\n'
        (folder / "figures" / f"{figure.name}.svg").write_text(prolog + figure.svg, encoding="utf-8")
        (folder / "figures" / f"{figure.name}.csv").write_text(figure.csv(), encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(render_page(report, drawn), encoding="utf-8")
    # Last and whole: a folder with report.json is a finished evaluation.
    write_text(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False))
    return page


def render_page(report: Report, figures: Sequence[Figure]) -> str:
    """The self-contained page; everything but our own SVG is escaped.

    Args:
        report: of `build_report`.
        figures: of `draw_all`.

    Returns:
        HTML.
    """
    environment = Environment(
        loader=PackageLoader("eval", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(arm_label=arm_label, domain_name=domain_name, struck=struck, lost_words=lost_words)
    environment.filters.update(
        speed=show.speed,
        percent=show.percent,
        number=show.number,
        ms=show.ms,
        medians=show.medians,
        gain=show.gain,
        compact=show.compact,
        plain=show.plain,
    )
    return environment.get_template("page.html.j2").render(
        report=report,
        verdict=report["verdict"],
        choice=report["choice"],
        judged=judged_cell(report),
        baseline=baseline_cell(report),
        domain_cells=[c for c in ladder(report, "judged") if c["latency_speedup"]],
        headroom=headroom(report),
        shift=shift(report),
        schedule=schedule(report),
        matrix=report.get("matrix"),
        matrix_table=matrix_table(report),
        key_figures=key_figures(report),
        notes=notes(report),
        nothing_held=NOTHING_HELD,
        trust=trust(report),
        cells=ordered_cells(report),
        figures=figures,
        definitions=DEFINITIONS,
        about_device=", ".join(text for _, text in flat(report["device"])),
        about=[
            ("Target", flat(report["target"])),
            *[(f"Draft {d['name']}", flat(d)) for d in report["drafts"]],
            ("Device", flat(report["device"])),
            ("Settings", flat(report["settings"])),
            ("Provenance", flat(report["provenance"])),
        ],
        show=show,
    )


def terminal_table(report: Report) -> Table:
    """The verdict and the ranking for a terminal; nothing in it is read as markup.

    Args:
        report: of `build_report`.

    Returns:
        a table that a rich console prints.
    """
    verdict, choice = report["verdict"], report["choice"]
    title = Text(f"{STATUS[verdict['status']]}: {show.plain(verdict['headline'], 400)}", style="bold")
    table = Table(title=title, title_justify="left")
    table.add_column("arm", overflow="fold", min_width=18)
    for name in ("latency", "95% interval", "throughput", "equal memory", "p95 ms", "alpha", "tau", ""):
        table.add_column(name, justify="right")
    for c in choice["ranking"]:
        cells = (
            show.plain(arm_label(c), 48),
            show.speed(c["value"]),
            show.interval(c["low"], c["high"]) if c["k"] else "",
            show.speed(c["throughput_speedup"]) if c["k"] else "1.00x",
            show.equal_memory(c["equal_memory"]) if c["k"] else "1.00x",
            show.ms(p95(c)),
            show.number(c["alpha"]),
            show.number(c["tau"]),
            "chosen" if c["arm"] == choice["arm"] else "",
        )
        table.add_row(*(Text(cell) for cell in cells))
    load = next((c["load"] for c in choice["ranking"] if c["load"]), None)
    if load:
        table.caption = (
            f"batch {load['batch']}, prompts of {load['context_tok']:,.0f}, answers of {load['new_tok']:,.0f} tokens, "
            f"{load['num_requests']} requests; all over the baseline's, throughput also with as much memory"
        )
    return table
