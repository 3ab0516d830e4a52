"""Simulated acceptance in a report: what it was, what the cost model says to it, and that nothing follows of it.

The given rates take the place of a draft's quality. What is left is the system: does a cycle cost what the model says,
and what would a draft of such acceptance end at? No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from engine import costs as model
from engine.cycle import positions_of
from eval import show
from eval.arms import rates_text
from eval.cells import Cell
from eval.predict import ERROR_BAR_FRAC
from eval.records import RequestRow


def rates_of(rows: Sequence[RequestRow]) -> tuple[float, ...]:
    """The rates that the rows were accepted by; empty for real ones.

    Raises:
        ValueError: real and simulated rows, or several rates, in one evaluation.
    """
    found = {r.simulated for r in rows if r.k}
    if len(found) > 1:
        named = "; ".join(rates_text(rates) or "real" for rates in sorted(found))
        raise ValueError(f"rows of several kinds of acceptance ({named}): a report is of one; measure them apart")
    return found.pop() if found else ()


def check(cells: Sequence[Cell], plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """Predicted against measured at the given rates: the costs are the plan's, timed cycle by cycle.

    Args:
        cells: of `build_cells`, of simulated rows.
        plan: plan.json; without it nothing can be predicted.

    Returns:
        `cells`: of every chain arm, label, k, domain, group, batch, context_tok, new_tok, num_requests, expected_tau
        and tau, predicted and measured speedup (all requests together) and error_frac (None without costs);
        `mean_abs_error_frac`, None without any; `bar_frac`.
    """
    found = []
    for c in cells:
        if not c["simulated"] or not c["chain"] or c["status"] != "ok":
            continue
        k, rates = c["k"], positions_of(c["simulated"], c["k"])
        costs = model.costs_for(plan, c["draft"], round(c["context_tok"]["p50"]), c["batch"]) if plan else None
        known = costs is not None and k <= max(costs.V_ms)
        predicted = model.predicted_speedup(costs, k, rates, **c["request"]) if costs and known else None
        measured = c["latency_speedup"]["total"]
        found.append(
            {
                "arm": c["arm"], "label": c["label"], "k": k, "domain": c["domain"], "group": c["group"],
                "batch": c["batch"], "context_tok": c["context_tok"]["p50"], "new_tok": c["new_tok"]["p50"],
                "num_requests": c["num_requests"], "expected_tau": model.tau_by_position(rates), "tau": c["tau"],
                "predicted": predicted, "measured": measured,
                "error_frac": predicted / measured - 1 if predicted else None,
            }
        )  # fmt: skip
    errors = [abs(c["error_frac"]) for c in found if c["error_frac"] is not None]
    return {
        "cells": found,
        "mean_abs_error_frac": fmean(errors) if errors else None,
        "bar_frac": ERROR_BAR_FRAC,
    }


def check_table(found: Mapping[str, Any]) -> Table:
    """What `check` found, for a terminal."""
    mean = found["mean_abs_error_frac"]
    error = "" if mean is None else f", mean absolute error {mean:.1%} (the bar is {found['bar_frac']:.0%})"
    table = Table(title=f"Simulated acceptance: predicted against measured{error}")
    table.add_column("arm", overflow="fold")
    for name in ("context", "answer", "requests", "tau by the rates", "tau", "predicted", "measured", "error"):
        table.add_column(name, justify="right")
    for c in found["cells"]:
        table.add_row(
            c["label"], f"{c['context_tok']:,.0f}", f"{c['new_tok']:,.0f}", str(c["num_requests"]),
            f"{c['expected_tau']:.2f}", f"{c['tau']:.2f}", show.speed(c["predicted"]), show.speed(c["measured"]),
            show.percent(c["error_frac"], 1),
        )  # fmt: skip
    return table


def no_verdict(verdict: Mapping[str, Any], rates: Sequence[float]) -> dict[str, Any]:
    """The verdict of a simulated evaluation: none, whatever the figures.

    Args:
        verdict: of `verdict.decide`, as if the acceptance were a draft's.
        rates: the given ones.
    """
    said = (
        f"Simulated acceptance ({rates_text(rates)}): not a measurement of a draft. It shows what the system "
        "would make of a draft that is accepted so."
    )
    return {
        **verdict,
        "go": False,
        "status": "simulated",
        "headline": said,
        "notices": [f"If a draft were accepted so: {verdict['headline']}", "The text is not the target's."],
    }
