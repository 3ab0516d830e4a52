"""Parts of a cell: one arm's load, limits, prediction, shares and waterfall, in one place. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from engine import costs as model
from engine.costs import Costs
from eval import stats
from eval.records import LOOKUP, RequestRow, is_chain
from eval.speedup import realised_frac

Cell = dict[str, Any]


def policy_words(one: RequestRow) -> str:
    """How an arm proposes, in words."""
    if not one.k:
        return "no speculation"
    if one.tree:
        return f"tree of {len(one.tree) - 1}, depth {one.k}"
    return f"chain, k = {one.k}" if one.policy == "fixed" else f"{one.policy}, k <= {one.k}"


def measured_verify_ms(rows: Sequence[RequestRow], share: Mapping[str, float] | None) -> float | None:
    """Mean verify time of a cycle, as it was measured."""
    num = sum(len(r.cycles) for r in stats.bare(rows))
    return share["verify"] * sum(r.wall_ms for r in stats.bare(rows)) / num if share and num else None


def mean_request(rows: Sequence[RequestRow], baseline: Sequence[RequestRow], steady: bool = False) -> dict[str, float]:
    """The cell's mean request, for the model: prefills in ms and answer length in tokens.

    In a batch the prefills of other rows' prompts stop this one's decoding and are counted with its own: no draft makes
    them shorter either.

    Args:
        rows, baseline: one run of each request.
        steady: for tokens a second in place of one request's time: every row is taken again as soon as it is free, so
            that as many prompts are read in a request's time as there are rows.
    """
    before, draft = fmean(r.prefill_ms for r in baseline or rows), fmean(r.draft_prefill_ms for r in rows)
    if steady:
        before, draft = before * rows[0].batch, draft * rows[0].batch
    elif rows[0].batch > 1 and baseline:
        before = fmean(r.e2e_ms - r.wall_ms for r in baseline)
        draft = max(0.0, fmean(r.e2e_ms - r.wall_ms for r in rows) - before)
    return {
        "prefill_ms": before,
        "draft_prefill_ms": draft,
        "new_tok": max(1, round(fmean(r.new_tok for r in rows))),
    }


def eager_ms(one: RequestRow, planned: Costs | None, costs: Costs | None) -> float | None:
    """Draft time a token in eager mode: from the plan, else from the rows where nothing was captured."""
    if planned and planned.t_eager_ms is not None:
        return planned.t_eager_ms
    captured = planned is not None and planned.t_graph_ms is not None
    return costs.t_ms if costs and one.draft != LOOKUP and not captured else None


def launch_bound_frac(planned: Costs | None) -> float | None:
    """1 - t_graph / t_eager: what a captured graph saves of a draft step; None where either is not known."""
    if planned is None or not planned.t_eager_ms or planned.t_graph_ms is None:
        return None
    return 1 - planned.t_graph_ms / planned.t_eager_ms


def limits(one: RequestRow, costs: Costs | None, request: Cell, speedup: Cell | None) -> Cell:
    """s, ceiling, realised part and break-even acceptance, from this cell's own costs."""
    if costs is None:
        return {"s": None, "ceiling": None, "realised_frac": None, "alpha_break_even": None}
    top = model.ceiling(costs, request["prefill_ms"], request["new_tok"])
    chain = one.draft != LOOKUP and one.policy == "fixed"
    even = model.break_even_alpha(costs, one.k, **request) if chain else None
    return {
        "s": top.s,
        "ceiling": top.speedup,
        "realised_frac": realised_frac(speedup["total"], top.speedup) if speedup else None,
        # In the measure of the pooled alpha, accepted over proposed, so that the two can be subtracted.
        "alpha_break_even": (model.tau(even, one.k) - 1) / one.k if even is not None else None,
    }


def prediction(
    one: RequestRow, planned: Costs | None, moved: Costs | None, accepted: Cell, request: Cell, speedup: Cell | None
) -> Cell:
    """What costs measured elsewhere (the plan, else the other domains) say, with this cell's acceptance."""
    costs, k = planned or moved, one.k if is_chain(one) else 0
    positions = [p["c"] for p in accepted["accept_by_position"] if p["c"] is not None]
    if costs is None or costs.draft == LOOKUP or not positions or not speedup or not 0 < k <= max(costs.V_ms):
        return {"predicted_speedup": None, "predicted_from": None, "prediction_error_frac": None}
    predicted = model.predicted_speedup(costs, k, positions, **request)
    return {
        "predicted_speedup": predicted,
        "predicted_from": "plan" if planned else "other domains",
        "prediction_error_frac": predicted / speedup["total"] - 1,
    }


def all_shares(
    rows: Sequence[RequestRow], share: dict[str, float] | None, costs: Costs | None, planned: Costs | None
) -> dict[str, float | None] | None:
    """Phase shares with the two cross-cuts, prefix KV (inside verify) and waste, which are not added to them."""
    if share is None:
        return None
    wall = sum(r.wall_ms for r in rows)
    wasted = stats.waste_ms(rows, costs) if rows[0].k else None
    prefix = None
    if planned and planned.prefix_kv_ms:
        prefix = median(planned.prefix_kv_ms.values()) * sum(len(r.cycles) for r in rows) / wall
    return {**share, "prefix_kv": prefix, "waste": wasted / wall if wasted is not None else None}


def prefix_spread_frac(planned: Costs | None) -> float | None:
    """How far the estimates of prefix KV time lie apart: (max - min) / median."""
    values = list((planned.prefix_kv_ms or {}).values()) if planned else []
    return (max(values) - min(values)) / median(values) if len(values) > 1 and median(values) > 0 else None


def waterfall(cell: Cell, costs: Costs | None, rows: Sequence[RequestRow]) -> list[dict[str, Any]]:
    """tau down to the end-to-end speedup of all requests together; empty where a part is missing."""
    share, plain = cell["share"], stats.bare(rows)
    num = sum(len(r.cycles) for r in plain)
    if not (costs and share and cell["tau"] and cell["latency_speedup"] and num):
        return []
    cycle = sum(r.wall_ms for r in plain) / num
    verify, draft, sampling, host = (share[name] * cycle for name in ("verify", "draft", "sampling", "host"))
    total = cell["latency_speedup"]["total"]
    steps = model.waterfall(cell["tau"], costs.T_ms, verify, draft, sampling, host, total)
    return [asdict(step) for step in steps]
