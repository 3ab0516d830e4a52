"""Tokens a second under a load, beside the baseline's, and the memory that it takes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from eval.bootstrap import ratio_interval, statistic_interval
from eval.records import RequestRow
from eval.stats import bare, by_request, tokens_per_s


def throughput(rows: Sequence[RequestRow], baseline: Sequence[RequestRow], times: int, seed: int) -> dict[str, Any]:
    """Tokens a second of an arm and its ratio to the baseline's over the same sets.

    At batch 1 the time is that of the requests, one after another; above, the steady state: while no row was empty,
    prefills counted as far as their answers lie in it.

    Args:
        rows, baseline: measured rows at one batch.
        times, seed: of the bootstrap, over requests at batch 1 and over sets above.

    Returns:
        throughput_tok_s; throughput_speedup and its interval throughput_ci (None for the baseline, the interval also
        with fewer than two sets); sets: {set, tok_s, base_tok_s, speedup} at batch over 1.
    """
    if not rows or not rows[0].k:
        return {"throughput_tok_s": _tok_s(rows), "throughput_speedup": None, "throughput_ci": None, "sets": []}
    speed, base_speed = _tok_s(rows), _tok_s(baseline)
    found: dict[str, Any] = {
        "throughput_tok_s": speed,
        "throughput_speedup": speed / base_speed if speed and base_speed else None,
        "throughput_ci": None,
        "sets": [],
    }
    if rows[0].batch == 1:
        pace, base = _pace(rows), _pace(baseline)
        both = [name for name in base if name in pace]
        ci = ratio_interval([base[name] for name in both], [pace[name] for name in both], times, seed)
        return found | {"throughput_ci": list(ci) if ci else None}
    mine, theirs = _sets(rows), _sets(baseline)
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return found
    a, b = np.array([mine[s] for s in shared]), np.array([theirs[s] for s in shared])

    def ratio(index: Any) -> Any:
        return (a[index, 0].sum(1) / a[index, 1].sum(1)) / (b[index, 0].sum(1) / b[index, 1].sum(1))

    interval = statistic_interval(len(shared), ratio, times, seed)
    sets = [
        {"set": s, "tok_s": 1e3 * x[0] / x[1], "base_tok_s": 1e3 * y[0] / y[1], "speedup": x[0] / x[1] / (y[0] / y[1])}
        for s, x, y in zip(shared, a.tolist(), b.tolist(), strict=True)
    ]
    return found | {
        "throughput_speedup": float(ratio(np.arange(len(shared))[None])[0]),
        "throughput_ci": list(interval) if interval else None,
        "sets": sets,
    }


def memory_bytes(
    one: RequestRow,
    contexts: Sequence[int],
    lengths: Sequence[int],
    memory: Mapping[str, Mapping[str, float]] | None,
) -> dict[str, float] | None:
    """Weights and KV that a load takes: the target's, and the draft's where there is one.

    Args:
        one: a row of the arm.
        contexts, lengths: prompt and answer tokens of its requests; their mean is what a row holds at the end.
        memory: of plan.json: {weights, kv_per_tok} in bytes, of the target under "" and of each draft by name. Of a
            windowed draft its newest tokens count, not the first ones and the slots of a cycle under way.

    Returns:
        weights, kv_per_row and total at this batch; None where the sizes are not known.
    """
    if memory is None:
        return None
    target, draft = memory[""], memory.get(one.draft, {}) if one.draft else {}
    held = fmean(contexts) + fmean(lengths)
    draft_held = held if one.recent is None else min(held, one.recent)
    weights = target["weights"] + draft.get("weights", 0.0)
    kv = target["kv_per_tok"] * held + draft.get("kv_per_tok", 0.0) * draft_held
    return {"weights": weights, "kv_per_row": kv, "total": weights + one.batch * kv}


def equal_memory(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """The arm's throughput over the baseline's with as many rows as fit the arm's memory.

    Args:
        cell: of an arm.
        cells: all of them; the baseline's at other batches say what more rows give.

    Returns:
        {rows, speedup, at_most}: the baseline's rows, and the ratio by a line between measured batches; where the rows
        lie beyond the largest measured batch None, and in its place the ratio at that batch, which more rows do not
        raise. None where memory or throughput is not known.
    """
    same = [c for c in cells if not c["k"] and (c["domain"], c["group"]) == (cell["domain"], cell["group"])]
    here = next((c for c in same if c["batch"] == cell["batch"]), None)
    mine, speed = cell.get("memory_bytes"), cell.get("throughput_tok_s")
    if not cell["k"] or here is None or not mine or not speed or not here.get("memory_bytes"):
        return None
    base = here["memory_bytes"]
    # Of equal texts never fewer than its own; where texts differ a shorter answer must not seem to free memory.
    rows = max(float(cell["batch"]), (mine["total"] - base["weights"]) / base["kv_per_row"])
    points = sorted((c["batch"], c["throughput_tok_s"]) for c in same if c.get("throughput_tok_s"))
    # Memory for more rows need not be used: what a smaller batch gives, a larger one has too.
    points = [(batch, max(v for b, v in points if b <= batch)) for batch, _ in points]
    known = points and points[0][0] <= rows <= points[-1][0]
    base_speed = float(np.interp(rows, [b for b, _ in points], [v for _, v in points])) if known else None
    beyond = bool(points) and rows > points[-1][0]
    return {
        "rows": rows,
        "speedup": speed / base_speed if base_speed else None,
        "at_most": speed / points[-1][1] if beyond else None,
    }


def _tok_s(rows: Sequence[RequestRow]) -> float | None:
    """Tokens a second over bare rows."""
    kept = bare(rows)
    if not kept or kept[0].batch == 1:
        return tokens_per_s(kept)
    spent = sum(r.steady_ms for r in kept)
    return 1e3 * sum(r.steady_tok for r in kept) / spent if spent else None


def _pace(rows: Sequence[RequestRow]) -> dict[str, float]:
    """Milliseconds a token of each request, prefills included."""
    found = by_request(bare(rows))
    return {name: fmean(r.e2e_ms for r in mine) / fmean(r.new_tok for r in mine) for name, mine in found.items()}


def _sets(rows: Sequence[RequestRow]) -> dict[int, tuple[int, float]]:
    """Steady tokens and milliseconds of each set, bare rows."""
    found: dict[int, tuple[int, float]] = {}
    for row in bare(rows):
        tokens, spent = found.get(row.set, (0, 0.0))
        found[row.set] = tokens + row.steady_tok, spent + row.steady_ms
    return {s: value for s, value in found.items() if value[0] and value[1]}
