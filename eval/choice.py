"""Which draft and settings to ship: by end-to-end time, never by acceptance. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from distill.schema_eval import batch_of
from eval.bootstrap import Floats, interval, resamples
from eval.candidates import TIE_RULE, Candidate, rank, shown
from eval.cells import Cell, Settings, overall
from eval.records import ALL, BASELINE, is_control
from eval.rivals import against_lookup, apart_from_lookup, by_load, grid_regret
from eval.speedup import objective_values

RANK_KEYS = {
    "latency@p50": "median over requests of paired end-to-end speedup",
    "latency@p95": "p95 end-to-end time of the baseline over that of the arm",
}
# An arm with fewer of the requests than this part of the most measured one can not be chosen: all others would be
# compared on its few. What a race dropped may have more, where cells differ in size, and can not be chosen either.
MIN_COVER_FRAC = 0.5


def rank_key(objective: str) -> str:
    """What the ranking goes by, in words."""
    batch = batch_of(objective)
    return RANK_KEYS[objective] if batch is None else f"steady tokens a second at batch {batch} over the baseline's"


def judged_pool(cells: Sequence[Cell], objective: str, domain: str) -> list[Cell]:
    """The cells that an objective is about: the smallest batch for a latency, its own for a throughput."""
    batch = batch_of(objective)
    return overall(cells if batch is None else [c for c in cells if c["batch"] == batch], domain)


def choose(
    cells: Sequence[Cell], settings: Settings, sizes: Mapping[str, int], dropped: Collection[str] = ()
) -> dict[str, Any]:
    """The choice for the domain that is judged, what each domain alone would choose, and what was given up.

    Args:
        cells: of `build_cells`.
        settings: of the report.
        sizes: parameters read per drafted token, by draft.
        dropped: arms that a race dropped, which is at batch 1.

    Returns:
        `choice` of report.json. Its arm is None when too few requests were measured.
    """
    here = judged_pool(cells, settings.objective, settings.domain)
    pool = [c for c in here if c["k"] and c["status"] == "ok"]
    plain = next((c for c in here if not c["k"]), None)
    choice: dict[str, Any] = {
        "objective": settings.objective,
        "rank_key": rank_key(settings.objective),
        "tie_rule": TIE_RULE,
        "arm": None,
        "draft": None,
        "policy": None,
        "k": None,
        "value": None,
        "regret": None,
        "held_out": None,
        "ranking": [],
        "acceptance_best": None,
        "longest_accepted": None,
        "domain": None,
        "by_domain": {},
        "by_load": [],
        "grid_regret": None,
        "lookup": None,
        "left_out": [],
    }
    kept = _covering(pool, dropped)
    choice["left_out"] = [c["arm"] for c in here if c["k"] and c not in kept]
    base, gains = _common(kept)
    if not kept or base.size < settings.needed:
        return choice
    arms = [c["arm"] for c in kept]
    regret: float | None = None
    held_out: float | None = None
    by_domain: dict[str, Any] = {}
    if batch_of(settings.objective) is None:
        ranking = rank(_candidates(kept, plain, base, gains, settings, sizes))
        chosen = ranking[0]
        regret, held_out = _regret(base, gains, arms, chosen.arm, settings)
        by_domain = _by_domain(cells, kept[0], chosen.arm, settings, sizes, dropped)
        lost = grid_regret(pool, chosen.arm, settings)
        lookup = against_lookup(ranking, arms, base, gains, settings)
    else:
        ranking = rank(_by_throughput(kept, plain, base, sizes))
        chosen = ranking[0]
        lost = 1 - chosen.value / max(c.value for c in ranking)
        lookup = apart_from_lookup(ranking)
    found = next((c for c in kept if c["arm"] == chosen.arm), None)
    drafts = [c for c in ranking if c.draft and not is_control(c.draft)]
    return choice | {
        "arm": chosen.arm,
        "draft": chosen.draft,
        "policy": found["policy"] if found else "no speculation",
        "k": chosen.k,
        "value": chosen.value,
        "num_requests": int(base.size),
        "regret": regret,
        "held_out": held_out,
        "ranking": [asdict(c) for c in ranking],
        "acceptance_best": _best_draft(drafts, chosen.k),
        "longest_accepted": asdict(max(drafts, key=lambda c: c.tau or 0)) if drafts else None,
        "domain": kept[0]["domain"],
        "by_domain": by_domain,
        "by_load": by_load(cells, kept[0]["domain"], chosen.arm, settings),
        "grid_regret": lost,
        "lookup": lookup,
    }


def _covering(cells: Sequence[Cell], dropped: Collection[str]) -> list[Cell]:
    """Cells of one load whose arms were measured to the end, or nearly."""
    left = [c for c in cells if c["batch"] > 1 or c["arm"] not in dropped]
    most = max((c["num_requests"] for c in left), default=0)
    return [c for c in left if c["num_requests"] >= MIN_COVER_FRAC * most]


def _common(cells: Sequence[Cell]) -> tuple[Floats, Floats]:
    """Baseline times [R] and speedups [arms, R] over the requests that all arms answered."""
    if not cells:
        return np.empty(0), np.empty((0, 0))
    tables = [{p["request_id"]: p for p in c["pairs"]} for c in cells]
    ids = [i for i in tables[0] if all(i in t for t in tables)]
    base = np.array([tables[0][i]["base_ms"] for i in ids])
    return base, np.array([[t[i]["speedup"] for i in ids] for t in tables])


def _candidates(
    cells: Sequence[Cell],
    plain: Cell | None,
    base: Floats,
    gains: Floats,
    settings: Settings,
    sizes: Mapping[str, int],
) -> list[Candidate]:
    """Every arm on the common requests, the baseline included."""
    index = resamples(base.size, settings.bootstrap, settings.seed)
    slow_base = float(np.percentile(base, 95))
    found = [Candidate(BASELINE, "", 0, 1.0, slow_base, 0, 1.0, 1.0, **shown(plain))]
    for cell, gain in zip(cells, gains):
        value = float(objective_values(base, gain, settings.objective))
        low, high = interval(objective_values(base[index], gain[index], settings.objective))
        slow = float(np.percentile(base / gain, 95))
        size = sizes.get(cell["draft"], 0)
        alpha, tau = cell["alpha"], cell["tau"]
        about = (cell["arm"], cell["draft"], cell["k"], value, slow, size, low, high, alpha, tau)
        found.append(Candidate(*about, **shown(cell)))
    return found


def _by_throughput(
    cells: Sequence[Cell], plain: Cell | None, base: Floats, sizes: Mapping[str, int]
) -> list[Candidate]:
    """Every arm by its tokens a second over the baseline's at one batch, which its interval over sets goes with."""
    slow = float(np.percentile(base, 95))
    found = [Candidate(BASELINE, "", 0, 1.0, slow, 0, 1.0, 1.0, **shown(plain))]
    for cell in cells:
        if cell["throughput_speedup"] is None or not cell["e2e_ms"]:
            continue
        low, high = cell.get("throughput_ci") or (None, None)
        size, slow = sizes.get(cell["draft"], 0), float(np.percentile([p["arm_ms"] for p in cell["pairs"]], 95))
        about = (cell["arm"], cell["draft"], cell["k"], cell["throughput_speedup"], slow, size, low, high)
        found.append(Candidate(*about, cell["alpha"], cell["tau"], **shown(cell)))
    return found


def _regret(
    base: Floats, gains: Floats, arms: Sequence[str], chosen: str, settings: Settings
) -> tuple[float, float | None]:
    """Expected loss of the choice, and what choosing is worth on requests it did not see.

    Regret: mean over resamples of 1 - value(chosen) / value(best there). Held out: the best arm of each resample,
    valued on the requests that were not drawn; the largest of many noisy values flatters itself, this does not.
    """
    every = np.vstack([np.ones_like(base), gains])
    at = 0 if chosen == BASELINE else 1 + arms.index(chosen)
    index = resamples(base.size, settings.bootstrap, settings.seed)
    values = np.array([objective_values(base[index], gain[index], settings.objective) for gain in every])
    regret = float((1 - values[at] / values.max(0)).mean())
    outside = []
    for row, best in zip(index[:400], values.argmax(0)):
        unseen = np.setdiff1d(np.arange(base.size), row)
        if unseen.size >= 3:
            outside.append(float(objective_values(base[unseen], every[best][unseen], settings.objective)))
    return regret, float(np.mean(outside)) if outside else None


def _best_draft(drafts: Sequence[Candidate], k: int) -> dict[str, Any] | None:
    """The draft with the highest acceptance, compared at the chosen k (or the nearest that each has)."""
    nearest: dict[str, Candidate] = {}
    for c in sorted(drafts, key=lambda c: (abs(c.k - k), c.k)):
        nearest.setdefault(c.draft, c)
    return asdict(max(nearest.values(), key=lambda c: c.alpha or 0)) if nearest else None


def _by_domain(
    cells: Sequence[Cell],
    like: Cell,
    chosen: str,
    settings: Settings,
    sizes: Mapping[str, int],
    dropped: Collection[str],
) -> dict[str, Any]:
    """What each domain alone would choose, and what the common choice loses there."""
    result = {}
    here = [c for c in cells if c["batch"] == like["batch"] and c["group"] == like["group"] and c["k"]]
    for domain in dict.fromkeys(c["domain"] for c in here):
        mine = _covering([c for c in here if c["domain"] == domain and c["status"] == "ok"], dropped)
        base, gains = _common(mine)
        if domain in (like["domain"], ALL) or base.size < settings.min_requests:
            continue
        ranking = rank(_candidates(mine, None, base, gains, settings, sizes))
        common = next((c for c in ranking if c.arm == chosen), ranking[0])
        result[domain] = {
            "arm": ranking[0].arm,
            "draft": ranking[0].draft,
            "k": ranking[0].k,
            "label": ranking[0].label,
            "value": ranking[0].value,
            "throughput_speedup": ranking[0].throughput_speedup,
            "equal_memory": ranking[0].equal_memory,
            "load": ranking[0].load,
            "chosen_value": common.value,
            "regret": max(0.0, 1 - common.value / ranking[0].value),
            "num_requests": int(base.size),
        }
    return result
