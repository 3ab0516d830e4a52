"""Measured times -> the cost model's lines: D(k) = d0 + k*t and V = c0 + c1*B*(k+1) + c2*sum(ctx)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VerifyFit:
    """V = c0 + c1*B*(k+1) + c2*sum(ctx): coefficients in ms, fit quality, and the worst relative residual."""

    c0: float
    c1: float
    c2: float
    r2: float
    worst_frac: float


def fit_draft(times_ms: Mapping[float, float]) -> tuple[float, float]:
    """d0 and t of D(k) = d0 + k*t by least squares, neither below 0.

    Args:
        times_ms: draft time of a cycle by k (k > 0; a mean over cycles need not be whole).

    Returns:
        (d0_ms, t_ms); with a single k, d0 is 0.

    Raises:
        ValueError: no time given.
    """
    if not times_ms:
        raise ValueError("no draft time given; measure at least one k")
    ks, ms = np.array(sorted(times_ms), float), np.array([times_ms[k] for k in sorted(times_ms)], float)
    through_origin = float(ks @ ms / (ks @ ks))
    if len(ks) == 1:
        return 0.0, through_origin
    slope, intercept = np.polyfit(ks, ms, 1)
    if intercept < 0:
        return 0.0, through_origin
    if slope < 0:
        return float(ms.mean()), 0.0
    return float(intercept), float(slope)


def fit_verify(samples: Sequence[tuple[int, int, float, float]]) -> VerifyFit:
    """V = c0 + c1*B*(k+1) + c2*sum(ctx) by least squares.

    Args:
        samples: (k, batch, sum of the rows' contexts in tokens, milliseconds), at least three.

    Returns:
        coefficients; c2 is 0 when every sample has the same context.

    Raises:
        ValueError: fewer than three samples.
    """
    if len(samples) < 3:
        raise ValueError(f"{len(samples)} verify times given; the line needs at least 3")
    table = np.array(samples, float)
    x = np.column_stack([np.ones(len(table)), table[:, 1] * (table[:, 0] + 1), table[:, 2]])
    if np.ptp(table[:, 2]) == 0:
        x[:, 2] = 0.0
    coefficients = np.linalg.lstsq(x, table[:, 3], rcond=None)[0]
    residual = table[:, 3] - x @ coefficients
    spread = float(((table[:, 3] - table[:, 3].mean()) ** 2).sum())
    r2 = 1.0 - float((residual**2).sum()) / spread if spread > 0 else 1.0
    c0, c1, c2 = (float(c) for c in coefficients)
    return VerifyFit(c0, c1, c2, r2, float(np.abs(residual / table[:, 3]).max()))
