"""The cost model fitted to rows, and how well it predicts cells that it was not fitted to. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from engine import costs as model
from engine.costs import MAX_K, Costs
from engine.surface import APART_FRAC, Surface, fit_surface
from eval import stats
from eval.records import BASELINE, LOOKUP, RequestRow, is_chain
from eval.speedup import pair

# Fewer pairs are a measurement of noise.
MIN_PAIRS = 3
NOTHING_HELD = (
    f"of cells with a draft at a fixed k there must be two to fit and to predict, {MIN_PAIRS} requests in each"
)
ERROR_BAR_FRAC = 0.05
Fold = Callable[[RequestRow], Any]


@dataclass(frozen=True)
class Fitted:
    """What the rows say about time.

    Attributes:
        surfaces: by draft.
        prefill: the target's: (a, b, c) of a + b*context + c*context**2 ms.
        draft_prefill: by draft.
    """

    surfaces: Mapping[str, Surface]
    prefill: tuple[float, float, float]
    draft_prefill: Mapping[str, tuple[float, float, float]]


def modelled(row: RequestRow) -> bool:
    """Whether the model describes the row: a draft's chain. Look-up does not always find k tokens to propose."""
    return is_chain(row) and row.draft != LOOKUP


def held_tok(context: float, new_tok: float) -> float:
    """Tokens in the cache halfway through an answer."""
    return context + new_tok / 2


def fit_rows(rows: Sequence[RequestRow], known: Sequence[Costs] = ()) -> Fitted:
    """Fits T, V, t, S and H to rows, a point for each draft, context group and batch.

    Args:
        rows: measured rows, baseline and chains.
        known: costs measured apart (the plan's), for the loads that the rows do not cover.

    Returns:
        the model; a draft without phased rows is not in it.
    """
    points: dict[str, list[Costs]] = {}
    for load in dict.fromkeys((r.group, r.batch) for r in rows):
        here = [r for r in rows if (r.group, r.batch) == load]
        base = [r for r in here if r.arm == BASELINE]
        for draft in dict.fromkeys(r.draft for r in here if modelled(r)):
            mine = [r for r in here if r.draft == draft and modelled(r)]
            ladder = [[r for r in mine if r.k == k] for k in sorted({r.k for r in mine})]
            costs = stats.fit_costs(base, ladder, draft)
            if costs is None:
                continue
            held = held_tok(fmean(r.context_tok for r in mine), fmean(r.new_tok for r in mine))
            kv = next((c.prefix_kv_ms for c in known if c.draft == draft and c.batch == load[1] and c.context), None)
            at = next((c.context for c in known if c.draft == draft and c.batch == load[1] and c.context), 1)
            fit = {"fit": kv["fit"] * held / at} if kv and "fit" in kv else None
            points.setdefault(draft, []).append(replace(costs, context=round(held), prefix_kv_ms=fit))
    bare = stats.bare(rows)
    plain = [(r.context_tok, r.prefill_ms) for r in bare if r.arm == BASELINE]
    drafts = {d: prefill_curve([(r.context_tok, r.draft_prefill_ms) for r in bare if r.draft == d]) for d in points}
    surfaces = {}
    for draft, found in points.items():
        spans = [held_tok(r.context_tok, r.new_tok) for r in rows if r.draft == draft]
        batches = {p.batch for p in found}
        # Loads that only the plan saw: what the rows saw is taken from them alone.
        far = [c for c in known if c.draft == draft and (c.batch not in batches or c.context > APART_FRAC * max(spans))]
        ends = [*spans, *(c.context for c in far)]
        surfaces[draft] = replace(fit_surface([*found, *far]), contexts=(round(min(ends)), round(max(ends))))
    return Fitted(surfaces, prefill_curve(plain), drafts)


def prefill_curve(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The (a, b, c), none below 0, of a + b*tokens + c*tokens**2 ms with the least squared relative error.

    Products take time by the token, attention by its square. A line through short and long prompts would give the short
    ones nothing, and by absolute error they would not count beside the long.

    Args:
        points: (prompt tokens, ms) of each prompt; those without time are left out.
    """
    x, y = np.array([point for point in points if point[1] > 0], float).reshape(-1, 2).T
    best, least = np.zeros(3), np.inf
    num = min(3, len(np.unique(x)))
    for powers in (some for size in range(1, num + 1) for some in combinations(range(3), size)):
        table = np.stack([x**power / y for power in powers], 1)
        found = np.linalg.lstsq(table, np.ones(len(y)), rcond=None)[0]
        error = float(((table @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[list(powers)] = found
    a, b, c = best.tolist()
    return a, b, c


SCHEMES: Mapping[str, str] = {
    "other requests": "costs from one half of the requests, acceptance and time from the other",
    "other cells": "costs from all cells but the one in question (domain, context group, batch)",
    "other loads": "costs from all context groups and batches but the one in question",
    "other k": "costs from all draft lengths but the one in question",
}


def _folds(rows: Sequence[RequestRow]) -> dict[str, Fold]:
    """How rows are split under each scheme; a row whose fold is None is always fitted to."""
    order = {name: i for i, name in enumerate(dict.fromkeys((r.group, r.domain, r.request_id) for r in rows))}
    seen: dict[tuple[str, str], int] = {}
    half: dict[Any, int] = {}
    for name in order:
        at = seen.get(name[:2], 0)
        half[name], seen[name[:2]] = at % 2, at + 1
    return {
        "other requests": lambda r: half[(r.group, r.domain, r.request_id)],
        "other cells": lambda r: (r.domain, r.group, r.batch),
        "other loads": lambda r: (r.group, r.batch),
        "other k": lambda r: r.k or None,
    }


def held_out(rows: Sequence[RequestRow], known: Sequence[Costs] = ()) -> dict[str, Any]:
    """Predicted against measured speedup of cells that the model was not fitted to.

    The model gives the costs; acceptance by position, prefills and answer length are the held-out cell's own.

    Args:
        rows: measured rows.
        known: as in `fit_rows`.

    Returns:
        `points`: scheme, draft, k, domain, group, batch, context_tok, num_requests, measured, predicted, error_frac,
        measured_load (the fit saw such a load); `schemes`: for each, num_cells, mean_abs_error_frac, worst_frac, and
        what it means; `bar_frac`. A scheme with nothing to hold out is left out.
    """
    kept = [r for r in rows if modelled(r) or r.arm == BASELINE]
    points: list[dict[str, Any]] = []
    for scheme, fold in _folds(kept).items():
        names = [f for f in dict.fromkeys(fold(r) for r in kept) if f is not None]
        if len(names) < (3 if scheme == "other k" else 2):
            continue
        for name in names:
            fitted = fit_rows([r for r in kept if fold(r) != name], known)
            out = [r for r in kept if fold(r) == name or (fold(r) is None and r.arm == BASELINE)]
            points += [{"scheme": scheme, **p} for p in _predict_cells(out, fitted)]
    schemes = {}
    for scheme, meaning in SCHEMES.items():
        errors = [abs(p["error_frac"]) for p in points if p["scheme"] == scheme]
        if errors:
            schemes[scheme] = {
                "num_cells": len(errors),
                "mean_abs_error_frac": fmean(errors),
                "worst_frac": max(errors),
                "meaning": meaning,
            }
    return {"points": points, "schemes": schemes, "bar_frac": ERROR_BAR_FRAC}


def error_of(held: Mapping[str, Any]) -> float | None:
    """The largest of the schemes' mean absolute errors: what the model is worth where it is worth least."""
    return max((s["mean_abs_error_frac"] for s in held["schemes"].values()), default=None)


def _predict_cells(rows: Sequence[RequestRow], fitted: Fitted) -> list[dict[str, Any]]:
    """Each chain cell among the rows, predicted by a model fitted elsewhere."""
    found = []
    for key in dict.fromkeys((r.arm, r.draft, r.k, r.domain, r.group, r.batch) for r in rows if modelled(r)):
        arm, draft, k, domain, group, batch = key
        here = [r for r in rows if (r.domain, r.group, r.batch) == key[3:]]
        mine, base = [r for r in here if r.arm == arm], [r for r in here if r.arm == BASELINE]
        pairs, surface = pair(base, mine), fitted.surfaces.get(draft)
        accepted = [p["c"] for p in stats.acceptance(mine, 1)["accept_by_position"] if p["c"] is not None]
        if surface is None or len(pairs) < MIN_PAIRS or not accepted:
            continue
        each = [rows_of[0] for rows_of in stats.by_request(stats.bare(mine)).values()]
        theirs = [rows_of[0] for rows_of in stats.by_request(stats.bare(base)).values()]
        # All that is not decoding: prefills, and in a batch the waiting for those of others.
        before = fmean(r.e2e_ms - r.wall_ms for r in theirs)
        request: dict[str, Any] = {
            "prefill_ms": before,
            "draft_prefill_ms": max(0.0, fmean(r.e2e_ms - r.wall_ms for r in each) - before),
            "new_tok": max(1, round(fmean(r.new_tok for r in each))),
        }
        context = fmean(r.context_tok for r in each)
        held = held_tok(context, request["new_tok"])
        costs = surface.at(held, batch, min(MAX_K, max(k, surface.max_k)))
        predicted = model.predicted_speedup(costs, k, accepted, **request)
        measured = sum(p.base_ms for p in pairs) / sum(p.arm_ms for p in pairs)
        found.append(
            {
                "draft": draft, "k": k, "domain": domain, "group": group, "batch": batch,
                "context_tok": round(context), "new_tok": request["new_tok"], "num_requests": len(pairs),
                "measured": measured, "predicted": predicted, "error_frac": predicted / measured - 1,
                "measured_load": surface.measured(held, batch, k),
            }
        )  # fmt: skip
    return found


def model_json(fitted: Fitted) -> dict[str, Any]:
    """The fitted model as report.json holds it under `model`."""
    return {
        "prefill_ms": dict(zip(("base", "per_tok", "per_tok_squared"), fitted.prefill, strict=True)),
        "drafts": {
            name: asdict(surface) | {"draft_prefill_ms": list(fitted.draft_prefill.get(name, (0.0, 0.0, 0.0)))}
            for name, surface in fitted.surfaces.items()
        },
    }
