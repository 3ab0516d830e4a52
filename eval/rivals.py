"""The choice beside its rivals: the free look-up, the whole grid, the best arm at every load. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.bootstrap import Floats, interval, resamples
from eval.candidates import Candidate
from eval.cells import Cell, Settings
from eval.records import ALL, BASELINE, LOOKUP, is_control
from eval.speedup import objective_values


def against_lookup(
    ranking: Sequence[Candidate], arms: Sequence[str], base: Floats, gains: Floats, settings: Settings
) -> dict[str, Any] | None:
    """The best draft's objective over the best look-up's on the same resamples; None without either."""
    if (pair := _best(ranking)) is None:
        return None
    draft, free = pair
    index = resamples(base.size, settings.bootstrap, settings.seed)
    ours, theirs = (gains[arms.index(c.arm)] for c in (draft, free))
    ratios = objective_values(base[index], ours[index], settings.objective) / objective_values(
        base[index], theirs[index], settings.objective
    )
    low, high = interval(ratios)
    return _beside(draft, free, low, high)


def apart_from_lookup(ranking: Sequence[Candidate]) -> dict[str, Any] | None:
    """The same from two intervals alone, where nothing pairs the arms: the ratio's is then the widest there can be."""
    if (pair := _best(ranking)) is None:
        return None
    draft, free = pair
    low = (draft.low or draft.value) / (free.high or free.value)
    high = (draft.high or draft.value) / (free.low or free.value)
    return _beside(draft, free, low, high)


def _best(ranking: Sequence[Candidate]) -> tuple[Candidate, Candidate] | None:
    """The best draft and the best look-up; None without either."""
    draft = next((c for c in ranking if c.draft and not is_control(c.draft)), None)
    free = next((c for c in ranking if c.draft == LOOKUP), None)
    return None if draft is None or free is None else (draft, free)


def _beside(draft: Candidate, free: Candidate, low: float, high: float) -> dict[str, Any]:
    """The draft over look-up, with the interval of the ratio."""
    return {
        "arm": free.arm,
        "draft_arm": draft.arm,
        "lookup_value": free.value,
        "value": draft.value / free.value,
        "low": low,
        "high": high,
        "level": low <= 1.0 <= high,
    }


def over_lookup(rival: Mapping[str, Any]) -> float:
    """The draft over the best look-up: the ratio of their objectives, or its interval's low end if that is larger.

    Under 1 look-up is ahead at the objective and the paired interval does not show the draft ahead.
    """
    return float(max(rival["value"], rival["low"]))


def grid_regret(cells: Sequence[Cell], chosen: str, settings: Settings) -> float | None:
    """What the choice loses against the best arm of the whole grid, arms that a race dropped early included.

    Args:
        cells: every arm with its pairs, over whatever requests each one answered.
        chosen: the chosen arm; the baseline is always among the rivals.
        settings: of the report.

    Returns:
        largest 1 - objective(chosen) / objective(rival), each pair on the requests that both answered; at least 0.
        None when the chosen arm shares requests with no rival.
    """
    tables = {c["arm"]: {p["request_id"]: p for p in c["pairs"]} for c in cells}
    mine = tables.get(chosen)
    lost = []
    for arm, theirs in tables.items():
        ids = [i for i in (mine if mine is not None else theirs) if i in theirs]
        if arm == chosen or len(ids) < 3:
            continue
        base = np.array([theirs[i]["base_ms"] for i in ids])
        rival = float(objective_values(base, np.array([theirs[i]["speedup"] for i in ids]), settings.objective))
        own = np.array([mine[i]["speedup"] for i in ids]) if mine is not None else np.ones(len(ids))
        lost.append(1 - float(objective_values(base, own, settings.objective)) / rival)
    if mine:
        base = np.array([p["base_ms"] for p in mine.values()])
        own = np.array([p["speedup"] for p in mine.values()])
        lost.append(1 - float(objective_values(base, own, settings.objective)))
    return max([0.0, *lost]) if lost else None


def by_load(cells: Sequence[Cell], domain: str, chosen: str, settings: Settings) -> list[dict[str, Any]]:
    """At every context group and batch: the fastest arm for one request, and the one with most tokens a second.

    Cells of one load have the same requests under every arm, so their own figures are compared; a race may have left
    some arms with fewer, which is why the verdict does not rest on this table.
    """
    found = []
    # Shorter contexts first, all of them together last.
    lengths = {(c["batch"], c["group"]): c["context_tok"]["p50"] for c in cells if c["domain"] == domain and c["k"]}
    for batch, group in sorted(lengths, key=lambda load: (load[0], load[1] == ALL, lengths[load])):
        here = [c for c in cells if (c["batch"], c["group"], c["domain"]) == (batch, group, domain)]
        ok = [c for c in here if c["k"] and c["status"] == "ok"]
        if not ok:
            continue
        fast = max(ok, key=lambda c: c["latency_speedup"]["p50"])
        wide = max(ok, key=lambda c: c["throughput_speedup"] or 0.0)
        mine = next((c for c in ok if c["arm"] == chosen), None)

        def name(cell: Cell, value: float | None) -> dict[str, Any]:
            pays = value is not None and value >= 1.0
            kept = {n: cell[n] for n in ("arm", "draft", "k")} | {"label": cell.get("label") or ""}
            same = cell["throughput_speedup_equal_memory"]
            shown = kept if pays else {"arm": BASELINE, "draft": "", "k": 0, "label": ""}
            return {**shown, "value": value, "equal_memory": same if pays else None}

        found.append(
            {
                "domain": domain,
                "group": group,
                "batch": batch,
                "context_tok": fast["context_tok"]["p50"],
                "new_tok": fast["new_tok"]["p50"],
                "num_requests": fast["num_requests"],
                "latency": name(fast, fast["latency_speedup"]["p50"]),
                "throughput": name(wide, wide["throughput_speedup"]),
                "chosen_latency": mine["latency_speedup"]["p50"] if mine else None,
                "chosen_throughput": mine["throughput_speedup"] if mine else None,
                "chosen_equal_memory": mine["throughput_speedup_equal_memory"] if mine else None,
                "objective": settings.objective,
            }
        )
    return found


def paying_parts(cells: Sequence[Cell], settings: Settings) -> tuple[list[dict[str, Any]], int]:
    """Where a draft pays though it may not on all of the traffic: one domain, one context group, one batch.

    Each part is judged by its own interval: of many parts some may pay by chance.

    Returns:
        the parts where some trained draft pays, best first: domain, group, batch, the best arm there with its objective
        and interval, and the best look-up's objective (None if not measured). And how many parts were judged.
    """
    parts: dict[tuple[int, str, str], list[Cell]] = {}
    for cell in cells:
        if cell["k"] and cell["status"] == "ok" and ALL not in (cell["domain"], cell["group"]):
            parts.setdefault((cell["batch"], cell["domain"], cell["group"]), []).append(cell)
    found, num = [], 0
    for (batch, domain, group), here in parts.items():
        drafts = [c for c in here if not is_control(c["draft"])]
        num += bool(drafts)
        best = max(drafts, key=_objective, default=None)
        if best is None or not pays(best, settings):
            continue
        free = max((_objective(c) for c in here if c["draft"] == LOOKUP), default=None)
        speed = best["latency_speedup"]
        about = {n: best[n] for n in ("arm", "draft", "k", "num_requests")} | {"label": best.get("label") or ""}
        value = {"value": _objective(best), "low": speed["objective_low"], "high": speed["objective_high"]}
        found.append({"domain": domain, "group": group, "batch": batch, **about, **value, "lookup_value": free})
    return sorted(found, key=lambda part: -part["value"]), num


def pays(cell: Cell, settings: Settings) -> bool:
    """Is an arm faster by enough in a cell, and surely faster?"""
    low = cell["latency_speedup"]["objective_low"]
    return _objective(cell) >= settings.min_speedup and low is not None and low >= 1.0


def _objective(cell: Cell) -> float:
    return float(cell["latency_speedup"]["objective"])
