"""`model` of report.json: the fitted cost model, its error on held-out cells, what-ifs, ceilings by load. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from engine import costs as model
from engine.costs import MAX_K, Costs
from engine.surface import APART_FRAC
from eval.cells import Cell
from eval.predict import Fitted, fit_rows, held_out, held_tok, model_json
from eval.records import LOOKUP, RequestRow
from eval.whatif import Case, answers, case_of

# Where the three estimates of prefix KV lie further apart, none of them is to be believed.
SPREAD_BAR_FRAC = 0.15
CONTEXTS = (128, 512, 2048, 8192)
BATCHES = (1, 4, 16, 64)


def explain(
    rows: Sequence[RequestRow], plan: Mapping[str, Any] | None, cells: Sequence[Cell], judged: Cell | None
) -> tuple[dict[str, Any], Fitted]:
    """Fits the model and asks it everything that the report shows.

    Args:
        rows: measured rows.
        plan: plan.json, or None.
        cells: of `build_cells`; their prefix KV shares are completed.
        judged: the cell that the verdict is about; None where nothing was judged.

    Returns:
        `prefill_ms`, `drafts` (fitted surfaces), `held_out`, `prefix_kv`, `what_if` (about the judged arm) and
        `loads`, both empty where the model does not describe the arm, and `not_described`: "" or why; and the fit.
    """
    known = [Costs.from_json(c) for c in (plan or {}).get("costs", [])]
    fitted = fit_rows(rows, known)
    set_prefix_shares(cells, fitted, known)
    found = model_json(fitted)
    found["not_described"] = not_described(judged)
    surface = fitted.surfaces.get(judged["draft"]) if judged and not found["not_described"] else None
    found["held_out"] = held_out(rows, known)
    found["prefix_kv"] = prefix_kv(known)
    case = case_of(found, surface, judged) if judged and surface and judged["accept_by_position"] else None
    found["what_if"] = answers(case) if case else []
    found["loads"] = ceilings(case) if case else []
    return found, fitted


def not_described(judged: Cell | None) -> str:
    """Why no what-if is answered about an arm: the model is made of chains of fixed length that see the whole text."""
    if judged is None or (judged["chain"] and judged["draft"] != LOOKUP):
        return ""
    window = "" if judged["recent"] is None else f", last {judged['recent']} tokens"
    what = "prompt look-up" if judged["draft"] == LOOKUP else f"{judged['policy']}{window}"
    return f"the cost model describes a draft's chains of fixed length that see the whole text; this is {what}"


def set_prefix_shares(cells: Sequence[Cell], fitted: Fitted, known: Sequence[Costs]) -> None:
    """Prefix KV share of cells whose context the plan did not measure, from the rows' own c2 * sum(ctx)."""
    for c in cells:
        surface = fitted.surfaces.get(c["draft"])
        if not surface or not c["share"] or not c["V_ms"]:
            continue
        held = held_tok(c["context_tok"]["p50"], c["new_tok"]["p50"])
        near = [p.context for p in known if p.draft == c["draft"] and p.batch == c["batch"] and p.context]
        if not any(1 / APART_FRAC <= held / at <= APART_FRAC for at in near):
            part = min(1.0, surface.kv_ms(c["batch"]) * c["batch"] * held / c["V_ms"])
            c["share"]["prefix_kv"] = part * c["share"]["verify"]


def prefix_kv(costs: Sequence[Costs]) -> list[dict[str, Any]]:
    """The estimates of prefix KV time side by side: of a verify pass, and of one step of the draft.

    Args:
        costs: of the plan.

    Returns:
        for each measured load and `of` ("verify pass" or "draft step"): draft, context, batch, the estimates in ms
        (`fit`: c2 * sum(ctx); `difference`: the time at this context less that at an empty cache; `bandwidth`: KV bytes
        over copy bandwidth), their `median_ms`, its `share_frac` of the pass or step, `spread_frac` ((max - min) /
        median) and `reliable` (spread within SPREAD_BAR_FRAC).
    """
    return [
        _estimates(c, of, kv, whole)
        for of, estimates in (
            ("verify pass", lambda c: (c.prefix_kv_ms, median(c.V_ms.values()))),
            ("draft step", lambda c: (c.draft_prefix_kv_ms, c.t_ms)),
        )
        for c in costs
        for kv, whole in [estimates(c)]
        if kv
    ]


def _estimates(costs: Costs, of: str, kv: Mapping[str, float], whole_ms: float) -> dict[str, Any]:
    """One line of `prefix_kv`."""
    values = list(kv.values())
    middle = median(values)
    spread = (max(values) - min(values)) / middle if len(values) > 1 and middle > 0 else None
    return {
        "of": of,
        "draft": costs.draft,
        "context": costs.context,
        "batch": costs.batch,
        **{f"{name}_ms": kv.get(name) for name in ("fit", "difference", "bandwidth")},
        "median_ms": middle,
        "share_frac": max(0.0, middle) / whole_ms if whole_ms else None,
        "spread_frac": spread,
        "reliable": spread is not None and spread <= SPREAD_BAR_FRAC,
    }


def ceilings(case: Case) -> list[dict[str, Any]]:
    """What a draft, and any draft, could give at each context and batch that the fit reaches.

    Args:
        case: the draft; its own load is among the answers.

    Returns:
        context, batch, T_ms, V_ms at the case's k, `ceiling` (perfect and free), `perfect` (every token accepted at
        this draft's cost, best k), `break_even` (pooled like alpha; None: no acceptance pays), `predicted` at the
        case's acceptance and the best k (`best_k`, 0 is off), `measured_load`.
    """
    surface, k = case.surface, case.k
    found = []
    for context in sorted({*CONTEXTS, case.context}):
        for batch in sorted({*BATCHES, case.batch}):
            held = held_tok(context, case.new_tok)
            if not surface.reaches(held, batch, k):
                continue
            costs = surface.at(held, batch, min(MAX_K, max(k, surface.max_k)))
            request = case.request(context, case.new_tok, batch)
            even = model.break_even_alpha(costs, k, **request)
            best_k, best = model.best_k(costs, case.accept, **request) if case.accept else (0, 1.0)
            found.append(
                {
                    "context": context,
                    "batch": batch,
                    "T_ms": costs.T_ms,
                    "V_ms": model.verify_ms(costs, k),
                    "ceiling": model.ceiling(costs, request["prefill_ms"], case.new_tok).speedup,
                    "perfect": model.best_k(costs, 1.0, **request)[1],
                    "break_even": None if even is None else (model.tau(even, k) - 1) / k,
                    "best_k": best_k,
                    "predicted": best,
                    "measured_load": surface.measured(held, batch, k),
                }
            )
    return found
