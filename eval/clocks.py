"""The bare clock against the phase clock: do the phases describe the time that was measured without them? No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from eval.bootstrap import statistic_interval
from eval.records import RequestRow
from eval.stats import bare, phased

# The two may lie so far apart.
BAR_FRAC = 0.02
# Pairs below which nothing is said: requests at batch 1; sets above, where one run holds all requests of a set.
LEAST_REQUESTS, LEAST_SETS = 8, 3


def compare_clocks(rows: Sequence[RequestRow], times: int = 2000, seed: int = 0) -> dict[str, Any] | None:
    """Decode time by the phase clock over that by the bare one, in pairs: one request, one run after another.

    A pair at batch over 1 is a set, whose requests share each run: their times are no independent evidence.

    Args:
        rows: measured rows of one arm in one cell.
        times, seed: of the bootstrap over pairs.

    Returns:
        `diff_frac`: median over pairs of phased / bare - 1; its 95% interval `low_frac`, `high_frac` (None with fewer
        than two pairs); `num_pairs` and the `least` that are needed; `status`: "insufficient" with fewer than these;
        "unreliable" where the whole interval lies beyond BAR_FRAC; "within" where all of it lies inside; else
        "not shown": the pairs do not decide. None without a pair.
    """
    if not rows:
        return None
    in_sets = rows[0].batch > 1
    pairs: dict[Hashable, list[RequestRow]] = defaultdict(list)
    for row in rows:
        pairs[row.set if in_sets else (row.request_id, row.repeat)].append(row)
    ratios = []
    for found in pairs.values():
        plain, timed = (sum(r.wall_ms for r in clock(found)) for clock in (bare, phased))
        if plain > 0 and timed > 0:
            ratios.append(timed / plain)
    if not ratios:
        return None
    ratio = np.array(ratios)
    found_ci = statistic_interval(len(ratio), lambda index: np.median(ratio[index], axis=-1), times, seed)
    low, high = (None, None) if found_ci is None else (found_ci[0] - 1, found_ci[1] - 1)
    least = LEAST_SETS if in_sets else LEAST_REQUESTS
    return {
        "diff_frac": float(np.median(ratio)) - 1,
        "low_frac": low,
        "high_frac": high,
        "num_pairs": len(ratio),
        "least": least,
        "unit": "sets" if in_sets else "requests",
        "status": _status(low, high, len(ratio) >= least),
    }


def _status(low: float | None, high: float | None, enough: bool) -> str:
    if low is None or high is None or not enough:
        return "insufficient"
    if low > BAR_FRAC or high < -BAR_FRAC:
        return "unreliable"
    return "within" if low >= -BAR_FRAC and high <= BAR_FRAC else "not shown"


def surely_apart_frac(clocks: dict[str, Any] | None) -> float | None:
    """The smallest disagreement that the interval allows: 0 where it holds 0; None where too few pairs were timed."""
    if clocks is None or clocks["status"] == "insufficient":
        return None
    return max(0.0, clocks["low_frac"], -clocks["high_frac"])


def enough_pairs_frac(clocks: dict[str, Any] | None) -> float | None:
    """Pairs over those that a comparison needs; None where nothing was timed by phase."""
    return clocks["num_pairs"] / clocks["least"] if clocks else None
