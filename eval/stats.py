"""Rows -> acceptance, times, shares and costs as docs/metrics.md defines them, one function each. No torch.

Every function takes rows that `records.measured` let through, of one arm (or a baseline and one arm) in one cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from engine.costs import Costs, verify_ms
from engine.fit import fit_draft
from eval.bootstrap import ratio_interval
from eval.records import LOOKUP, PHASES, Cycle, RequestRow, counted

# Below this many requests a 95th percentile is the largest value under another name.
MIN_REQUESTS_P95 = 20


def by_request(rows: Sequence[RequestRow]) -> dict[str, list[RequestRow]]:
    """Rows of each request, requests in order of first appearance."""
    found: dict[str, list[RequestRow]] = defaultdict(list)
    for row in rows:
        found[row.request_id].append(row)
    return dict(found)


def bare(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """Rows whose totals count."""
    return [r for r in rows if r.clock == "bare"]


def phased(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """Rows whose shares count."""
    return [r for r in rows if r.clock == "phased"]


def percentiles(values: Sequence[float]) -> dict[str, float | None] | None:
    """p50 and p95, which is None under MIN_REQUESTS_P95 values; None without values."""
    if not values:
        return None
    p50, p95 = np.percentile(values, [50, 95])
    return {"p50": float(p50), "p95": float(p95) if len(values) >= MIN_REQUESTS_P95 else None}


def counted_cycles(rows: Sequence[RequestRow]) -> tuple[dict[str, list[Cycle]], int]:
    """Cycles that count for acceptance, by request, and the number of all cycles.

    Repeats that went the same way count once.

    Args:
        rows: of one arm.
    """
    per_request: dict[str, list[Cycle]] = defaultdict(list)
    num_all = 0
    for row in {(r.request_id, r.cycles): r for r in rows}.values():
        per_request[row.request_id].extend(counted(row))
        num_all += len(row.cycles)
    return dict(per_request), num_all


def acceptance(rows: Sequence[RequestRow], times: int = 2000, seed: int = 0) -> dict[str, Any]:
    """alpha, tau, their interval, acceptance by position and the histogram of accepted tokens.

    Repeats that went the same way count once. Rows that proposed nothing (the baseline, a run that died early) give
    None, never 0 or 1.

    Args:
        rows: of one arm.
        times, seed: of the bootstrap over requests.

    Returns:
        alpha = sum a / sum k; tau = sum n / cycles; tau_per_request (mean of each request's tau);
        mean_accepted (tau without the correction or bonus token); tau_ci; accept_by_position with A_j and c_j;
        histogram[a] = cycles that accepted a; num_cycles, num_cut, num_plain (proposed nothing), drafted, accepted.
    """
    per_request, num_all = counted_cycles(rows)
    cycles = [c for found in per_request.values() for c in found]
    drafted, accepted = sum(c.proposed for c in cycles), sum(c.accepted for c in cycles)
    result: dict[str, Any] = {
        "alpha": None,
        "tau": None,
        "tau_ci": None,
        "tau_per_request": None,
        "mean_accepted": None,
        "accept_by_position": [],
        "histogram": [],
        "num_cycles": len(cycles),
        "num_cut": num_all - len(cycles),
        "num_plain": sum(c.proposed == 0 for c in cycles),
        "drafted": drafted,
        "accepted": accepted,
    }
    if not drafted:
        return result
    longest = max(c.proposed for c in cycles)
    emitted = [sum(c.emitted for c in found) for found in per_request.values() if found]
    counts = [len(found) for found in per_request.values() if found]
    ci = ratio_interval(emitted, counts, times, seed)
    return result | {
        "alpha": accepted / drafted,
        "tau": sum(emitted) / sum(counts),
        "tau_ci": list(ci) if ci else None,
        "tau_per_request": fmean(e / c for e, c in zip(emitted, counts)),
        "mean_accepted": accepted / len(cycles),
        "accept_by_position": _by_position(cycles, longest),
        "histogram": [sum(c.accepted == a for c in cycles) for a in range(longest + 1)],
    }


def _by_position(cycles: Sequence[Any], longest: int) -> list[dict[str, Any]]:
    """A_j = P(first j accepted) and c_j = A_j / A_(j-1), over cycles that proposed at least j."""
    positions = []
    for j in range(1, longest + 1):
        long_enough = [c for c in cycles if c.proposed >= j]
        reached = sum(c.accepted >= j - 1 for c in long_enough)
        passed = sum(c.accepted >= j for c in long_enough)
        positions.append(
            {"j": j, "A": passed / len(long_enough), "c": passed / reached if reached else None, "num": reached}
        )
    return positions


def token_ms(rows: Sequence[RequestRow]) -> float | None:
    """Decode time a token over bare rows; of the baseline it is T."""
    tokens = sum(r.new_tok - 1 for r in bare(rows))
    return sum(r.wall_ms for r in bare(rows)) / tokens if tokens else None


def timing(rows: Sequence[RequestRow]) -> dict[str, dict[str, float | None] | None]:
    """TTFT, TPOT and end-to-end time at p50 and p95 over requests, each the geometric mean of its bare repeats."""
    found = by_request(bare(rows)).values()

    def over(times: Sequence[Sequence[float]]) -> dict[str, float | None] | None:
        return percentiles([geometric_mean(repeats) for repeats in times if repeats and min(repeats) > 0])

    return {
        "ttft_ms": over([[r.ttft_ms for r in repeats] for repeats in found]),
        "tpot_ms": over([[r.tpot_ms for r in repeats if r.tpot_ms is not None] for repeats in found]),
        "e2e_ms": over([[r.e2e_ms for r in repeats] for repeats in found]),
    }


def tokens_per_s(rows: Sequence[RequestRow]) -> float | None:
    """Answer tokens a second while the arm was running, over bare rows.

    At batch 1 the time is the sum of the requests' (repeats averaged); above, the length of the union of their spans.
    """
    kept = bare(rows)
    if not kept:
        return None
    if kept[0].batch == 1:
        found = by_request(kept).values()
        tokens = sum(fmean(r.new_tok for r in repeats) for repeats in found)
        busy_ms = sum(geometric_mean([r.e2e_ms for r in repeats]) for repeats in found)
    else:
        tokens = float(sum(r.new_tok for r in kept))
        busy_ms, until = 0.0, float("-inf")
        for start, end in sorted((r.start_s * 1e3, r.start_s * 1e3 + r.e2e_ms) for r in kept):
            busy_ms += max(0.0, end - max(start, until))
            until = max(until, end)
    return 1e3 * tokens / busy_ms if busy_ms else None


def shares(rows: Sequence[RequestRow]) -> tuple[dict[str, float] | None, float | None]:
    """share_x = sum X / sum W over phased rows, and the closure error |W - (D + V + S + H)| / W.

    Returns:
        shares of draft, verify, sampling and host, and the closure error; None, None without phased rows.
    """
    kept = [r for r in phased(rows) if r.phases_ms is not None and r.wall_ms > 0]
    wall = sum(r.wall_ms for r in kept)
    if not wall:
        return None, None
    share = {name: sum((r.phases_ms or {})[name] for r in kept) / wall for name in PHASES}
    return share, abs(1.0 - sum(share.values()))


def noise_frac(rows: Sequence[RequestRow]) -> float | None:
    """How far repeats of one baseline request lie apart: median of (max - min) / mean over requests; None without.

    At batch 1 alone: repeats in a batch run beside other requests.
    """
    spreads = []
    for found in by_request([r for r in bare(rows) if r.batch == 1]).values():
        walls = [r.wall_ms for r in found]
        if len(walls) > 1 and fmean(walls) > 0:
            spreads.append((max(walls) - min(walls)) / fmean(walls))
    return float(np.median(spreads)) if spreads else None


def fit_costs(baseline: Sequence[RequestRow], arms: Sequence[Sequence[RequestRow]], draft: str = "") -> Costs | None:
    """The cost model from measured rows: T, V(k), D(k) = d0 + k*t, S and H of one draft at all its k.

    Phase times are shares of the bare decode time, so that what is computed from them agrees with the bare totals.

    Args:
        baseline: rows of k = 0.
        arms: rows of each k of this draft.
        draft: its name.

    Returns:
        costs, or None without a baseline or phased rows.
    """
    T, first = token_ms(baseline), next((r for rows in arms for r in rows), None)
    base_share, _ = shares(baseline)
    # By mean proposals a cycle, which is a little under k: cycles near the length limit propose less.
    verify: dict[float, float] = {}
    drafting: dict[float, float] = {}
    ks: dict[int, float] = {}
    rest: dict[str, list[float]] = {"sampling": [], "host": []}
    for rows in arms:
        share, _ = shares(rows)
        num = sum(len(r.cycles) for r in bare(rows))
        if share is None or not num:
            continue
        cycle = sum(r.wall_ms for r in bare(rows)) / num
        proposed = sum(c.proposed for r in bare(rows) for c in r.cycles) / num
        k = rows[0].k
        # Look-up fills its block up to k whatever it found, so its passes are k wide.
        ks[k] = float(k) if draft == LOOKUP or not proposed else proposed
        verify[ks[k]], drafting[ks[k]] = share["verify"] * cycle, share["draft"] * cycle
        for name, found in rest.items():
            found.append(share[name] * cycle)
    if T is None or first is None or not verify:
        return None
    plain = {0.0: base_share["verify"] * T} if base_share is not None and base_share["verify"] > 0 else {}
    points = plain | verify
    slope = max(0.0, float(np.polyfit(list(points), list(points.values()), 1)[0])) if len(points) > 1 else 0.0
    table = {k: verify[mean] + slope * (k - mean) for k, mean in ks.items()}
    d0, t = fit_draft(drafting)
    context = round(fmean(r.context_tok for rows in arms for r in rows))
    S, H = max(0.0, fmean(rest["sampling"])), max(0.0, fmean(rest["host"]))
    if plain:
        table[0] = plain[0.0]
    return Costs(T, table, t, d0, S, H, context, first.batch, first.device, draft)


def waste_ms(rows: Sequence[RequestRow], costs: Costs | None) -> float | None:
    """R: sum of (k_i - a_i)*t + V(k_i) - V(a_i); a row's own measured waste comes first.

    Args:
        rows: of one arm.
        costs: measured costs of its draft, or None.

    Returns:
        milliseconds over all rows; None when it is neither measured nor computable.
    """
    total = 0.0
    for row in rows:
        if row.waste_ms is not None:
            total += row.waste_ms
            continue
        if costs is None:
            return None
        for c in row.cycles:
            extra = verify_ms(costs, c.proposed) - verify_ms(costs, c.accepted)
            total += (c.proposed - c.accepted) * costs.t_ms + max(0.0, extra)
    return total
