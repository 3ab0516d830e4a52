"""Bootstrap intervals over requests. A request is the unit: its cycles and repeats are not independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def resamples(num: int, times: int, seed: int) -> Ints:
    """Indices of requests drawn with replacement.

    Args:
        num: requests.
        times: resamples.
        seed: the same seed gives the same interval.

    Returns:
        [times, num] indices.
    """
    return np.random.default_rng(seed).integers(0, num, size=(times, num))


def interval(values: Floats, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of resampled values.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def ratio_interval(above: Sequence[float], below: Sequence[float], times: int, seed: int) -> tuple[float, float] | None:
    """Interval of sum(above) / sum(below), requests resampled whole.

    Args:
        above, below: one sum per request.
        times, seed: as in `resamples`.

    Returns:
        (low, high), or None with fewer than two requests.
    """
    top, bottom = np.asarray(above, float), np.asarray(below, float)
    if len(top) < 2:
        return None
    index = resamples(len(top), times, seed)
    sums = bottom[index].sum(1)
    kept = sums > 0
    return interval(top[index].sum(1)[kept] / sums[kept]) if kept.any() else None


def paired_difference_interval(
    one: tuple[Sequence[float], Sequence[float]],
    other: tuple[Sequence[float], Sequence[float]],
    times: int,
    seed: int,
) -> tuple[float, float] | None:
    """Interval of one pooled ratio less another over the same requests, which are resampled together.

    Args:
        one, other: (above, below) as in `ratio_interval`, of the same requests in the same order.
        times, seed: as in `resamples`.

    Returns:
        (low, high), or None with fewer than two requests.
    """
    sides = [(np.asarray(above, float), np.asarray(below, float)) for above, below in (one, other)]
    num = len(sides[0][0])
    if num < 2:
        return None
    index = resamples(num, times, seed)
    below = [bottom[index].sum(1) for _, bottom in sides]
    kept = (below[0] > 0) & (below[1] > 0)
    mine, theirs = (top[index].sum(1)[kept] / sums[kept] for (top, _), sums in zip(sides, below))
    return interval(mine - theirs) if kept.any() else None


def statistic_interval(
    num: int, statistic: Callable[[Ints], Floats], times: int, seed: int
) -> tuple[float, float] | None:
    """Interval of any statistic that can be computed for many resamples at once.

    Args:
        num: requests.
        statistic: [times, num] indices -> [times] values.
        times, seed: as in `resamples`.

    Returns:
        (low, high), or None with fewer than two requests.
    """
    return interval(statistic(resamples(num, times, seed))) if num >= 2 else None
