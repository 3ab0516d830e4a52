"""Measured costs at several loads -> costs at any context and batch. Pure arithmetic, no torch.

A verify pass over w = B*(k+1) tokens takes u(w) + c2(B)*sum(ctx): u is the measured table, read between its points;
beyond them it goes on along the table's least-squares slope. c2 is measured at each batch, since reading several rows
at once hides some of the time: 4.0 us a token at batch 1 and 2.2 at 16 on two cores. What is left (draft, sampling,
host) is a line in the rows and in the tokens that they hold. A load beyond the measured ones is an extrapolation and is
called so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from engine.cycle import MAX_K, Costs
from engine.fit import VerifyFit, fit_verify

# Two contexts closer than this do not show what context costs.
APART_FRAC = 1.5


@dataclass(frozen=True)
class Line:
    """base + per_row * (B - 1) + per_tok * sum(ctx), in ms; never below 0."""

    base: float
    per_row: float = 0.0
    per_tok: float = 0.0

    def at(self, context: float, batch: int) -> float:
        """Value for `batch` rows of `context` tokens."""
        return max(0.0, self.base + self.per_row * (batch - 1) + self.per_tok * batch * context)


@dataclass(frozen=True)
class Surface:
    """The costs of one draft as functions of context and batch.

    Attributes:
        draft, device: of the costs that it was fitted to.
        widths: (tokens of a pass, ms at an empty cache), rising.
        slope_ms: ms for a token more in the pass, beyond the table.
        kv: c2: (batch, ms for a token in the cache), rising by batch.
        rest: what a baseline step takes beside its pass.
        t, d0, sampling, host: of a cycle.
        contexts, batches, max_k: what was measured.
        fit: V = c0 + c1*B*(k+1) + c2*sum(ctx) over the same times; None with fewer than three.
    """

    draft: str
    device: str
    widths: tuple[tuple[float, float], ...]
    slope_ms: float
    kv: tuple[tuple[int, float], ...]
    rest: Line
    t: Line
    d0: Line
    sampling: Line
    host: Line
    contexts: tuple[int, int]
    batches: tuple[int, ...]
    max_k: int
    fit: VerifyFit | None

    def verify_ms(self, k: int, context: float, batch: int = 1) -> float:
        """V(k, ctx, B) in milliseconds."""
        xs, ys = np.array(self.widths).T
        width = batch * (k + 1.0)
        if width > xs[-1]:
            at = ys[-1] + self.slope_ms * (width - xs[-1])
        elif width < xs[0]:
            # Narrower passes are not surely cheaper: weights are read once whatever the width.
            at = max(0.5 * ys[0], ys[0] - self.slope_ms * (xs[0] - width))
        else:
            at = np.interp(width, xs, ys)
        return float(at) + self.kv_ms(batch) * batch * context

    def kv_ms(self, batch: int) -> float:
        """c2 at a batch, read between the measured ones; beyond them the nearest."""
        return read_table(self.kv, batch)

    def measured(self, context: float, batch: int = 1, k: int = 0) -> bool:
        """Whether this load lies among the measured ones (a fifth of leeway in context)."""
        low, high = self.contexts
        return (
            0.8 * low <= context <= 1.25 * high and min(self.batches) <= batch <= max(self.batches) and k <= self.max_k
        )

    def reaches(self, context: float, batch: int = 1, k: int = 0) -> bool:
        """Whether the fit may be asked at all: within twice the longest context and twice the widest pass measured.

        How a device turns from reading weights to being busy with tokens can not be told from narrow passes.
        """
        return context <= 2 * self.contexts[1] and batch * (k + 1) <= 2 * self.widths[-1][0]

    def at(self, context: float, batch: int = 1, max_k: int | None = None) -> Costs:
        """Costs at one load, ready for everything in `engine.costs`.

        Args:
            context: tokens in each row's cache.
            batch: rows.
            max_k: longest draft; None takes the longest measured.

        Raises:
            ValueError: batch or context out of range.
        """
        if batch < 1 or context < 0:
            raise ValueError(f"batch is {batch} and context {context}; they must be at least 1 and 0")
        longest = min(MAX_K, self.max_k if max_k is None else max_k)
        table = {k: self.verify_ms(k, context, batch) for k in range(longest + 1)}
        return Costs(
            T_ms=table[0] + self.rest.at(context, batch),
            V_ms=table,
            t_ms=self.t.at(context, batch),
            d0_ms=self.d0.at(context, batch),
            S_ms=self.sampling.at(context, batch),
            H_ms=self.host.at(context, batch),
            context=round(context),
            batch=batch,
            device=self.device,
            draft=self.draft,
            prefix_kv_ms={"fit": self.kv_ms(batch) * batch * context},
        )


def fit_surface(points: Sequence[Costs]) -> Surface:
    """Fits one draft's costs at several loads.

    Args:
        points: measured costs, at least one; `context` is what the cache held on average.

    Returns:
        the surface. c2 of a batch with one context is that of the nearest batch with several; without any that of
        passes of equal width in several batches, else the plan's own estimate, or 0. With one batch a row more costs a
        pass its tokens and the rest nothing.

    Raises:
        ValueError: no costs, or of several drafts.
    """
    if not points or len({p.draft for p in points}) != 1:
        raise ValueError(f"costs of {sorted({p.draft for p in points})} given; a surface is of one draft")
    samples = [
        (k, p.batch, float(p.batch * p.context), v)
        for p in points
        for k, v in (p.V_ms if 0 in p.V_ms else {0: p.T_ms, **p.V_ms}).items()
    ]
    kv = _context_ms(points, samples)
    at = {p.batch: read_table(kv, p.batch) for p in points}
    by_width: dict[float, list[float]] = {}
    for k, batch, held, v in samples:
        by_width.setdefault(batch * (k + 1.0), []).append(max(1e-9, v - at[batch] * held))
    widths = tuple((w, fmean(by_width[w])) for w in sorted(by_width))
    slope = float(np.polyfit([w for w, _ in widths], [v for _, v in widths], 1)[0]) if len(widths) > 1 else 0.0
    rest = [p.T_ms - p.V_ms.get(0, p.T_ms) for p in points]
    return Surface(
        points[0].draft,
        points[0].device,
        widths,
        max(0.0, slope),
        kv,
        _line(points, rest),
        _line(points, [p.t_ms for p in points]),
        _line(points, [p.d0_ms for p in points]),
        _line(points, [p.S_ms for p in points]),
        _line(points, [p.H_ms for p in points]),
        (min(p.context for p in points), max(p.context for p in points)),
        tuple(sorted({p.batch for p in points})),
        max(k for p in points for k in p.V_ms),
        fit_verify(samples) if len(samples) >= 3 else None,
    )


def read_table(table: Sequence[Sequence[float]], at: float) -> float:
    """A table of (x, y), x rising, read between its points; beyond them the nearest."""
    xs, ys = np.array(table, float).T
    return float(np.interp(at, xs, ys))


def _context_ms(
    points: Sequence[Costs], samples: Sequence[tuple[int, int, float, float]]
) -> tuple[tuple[int, float], ...]:
    """c2 by batch, or one for all where no batch has contexts that lie apart."""
    found = {b: _slope([s for s in samples if s[1] == b]) for b in sorted({p.batch for p in points})}
    if table := tuple((batch, slope) for batch, slope in found.items() if slope is not None):
        return table
    if (slope := _slope(samples)) is not None:
        return ((1, slope),)
    known = [
        p.prefix_kv_ms["fit"] / (p.batch * p.context)
        for p in points
        if p.prefix_kv_ms and "fit" in p.prefix_kv_ms and p.context
    ]
    return ((1, max(0.0, median(known)) if known else 0.0),)


def _slope(samples: Sequence[tuple[int, int, float, float]]) -> float | None:
    """What one more token in the cache adds to a pass of equal width; None where their contexts lie too close."""
    held: dict[float, list[tuple[float, float]]] = {}
    for k, batch, tokens, v in samples:
        held.setdefault(batch * (k + 1.0), []).append((tokens, v))
    over = under = 0.0
    for pairs in held.values():
        sums = [n for n, _ in pairs]
        if max(sums) < APART_FRAC * min(sums) or max(sums) == 0:
            continue
        middle, mean = fmean(sums), fmean(v for _, v in pairs)
        over += sum((n - middle) * (v - mean) for n, v in pairs)
        under += sum((n - middle) ** 2 for n in sums)
    return max(0.0, over / under) if under else None


def _line(points: Sequence[Costs], values: Sequence[float]) -> Line:
    """Least squares on rows and cached tokens, as far as they vary; slopes below 0, which only noise gives, are 0."""
    rows = np.array([p.batch - 1.0 for p in points])
    held = np.array([float(p.batch * p.context) for p in points])
    columns = {"per_row": rows} if np.ptp(rows) else {}
    if held.max() >= APART_FRAC * max(1.0, held.min()) and len(points) > len(columns) + 1:
        columns["per_tok"] = held
    y = np.array(values, float)
    while columns:
        x = np.column_stack([np.ones(len(y)), *columns.values()])
        found = np.linalg.lstsq(x, y, rcond=None)[0]
        worst = min(columns, key=lambda name: found[1 + list(columns).index(name)])
        if found[1 + list(columns).index(worst)] >= 0:
            return Line(float(found[0]), **{name: float(v) for name, v in zip(columns, found[1:])})
        del columns[worst]
    return Line(max(0.0, float(y.mean())))
