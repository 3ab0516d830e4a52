"""Measured costs of real cycles: T, V(k), D(k), sampling, host gap, and the copy bandwidth of the device.

The cycles are the decoder's own, at a given context and batch, over slabs whose content does not matter for time; so
what is measured is what a request will pay, not a micro-benchmark of a part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from engine.cache import kv_bytes_per_token
from engine.clock import phased
from engine.costs import Costs
from engine.draft import Drafter, ModelDrafter
from engine.model import Runner
from engine.speculate import Decoder, Request


def copy_bandwidth(device: torch.device | str = "cpu", nbytes: int = 1 << 28, rounds: int = 7) -> float:
    """Bytes per second of a large copy, read and written bytes both counted.

    Args:
        device: where to copy.
        nbytes: size of the buffer; it must be far over the caches.
        rounds: copies; the median counts.
    """
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spans = []
    for _ in range(rounds + 1):
        if source.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
    return 2 * nbytes / statistics.median(spans[1:])


def cycle_times(
    target: Runner, drafter: Drafter | None, ks: Sequence[int], context: int, batch: int = 1, rounds: int = 9
) -> dict[int, dict[str, float]]:
    """Median milliseconds of the phases of one cycle for each k, the ks interleaved round by round.

    Args:
        target: the target; its slab must hold `batch` rows of the context and 200 tokens more.
        drafter: what proposes; None measures k = 0 alone.
        ks: draft lengths, 0 for the baseline.
        context: tokens of each row when the cycle starts.
        batch: rows.
        rounds: measured cycles for each k, after two that warm up.

    Returns:
        {k: {"draft", "verify", "sampling", "host", "wall"}} in milliseconds.
    """
    generator = torch.Generator().manual_seed(0)
    vocab = target.config.vocab_size
    decoders: dict[int, Decoder] = {}
    for k in ks:
        decoder = Decoder(target, (), drafter if k else None, k, clock=phased(target.device))
        hidden = torch.zeros(target.config.hidden_size, dtype=target.dtype, device=target.device)
        for row in range(batch):
            ids = torch.randint(0, vocab, (context,), generator=generator).tolist()
            decoder.resume(Request(f"bench-{row}", tuple(ids), 1 << 20), hidden)
        decoders[k] = decoder
    samples: dict[int, list[dict[str, float]]] = {k: [] for k in ks}
    for i in range(rounds + 2):
        for k, decoder in decoders.items():
            start = decoder.clock.now_ms()
            decoder.cycle()
            wall = decoder.clock.now_ms() - start
            phases = decoder.clock.totals_ms()
            if i >= 2:
                samples[k].append({**phases, "host": wall - sum(phases.values()), "wall": wall})
    names = ("draft", "verify", "sampling", "host", "wall")
    return {k: {n: statistics.median(s.get(n, 0.0) for s in rows) for n in names} for k, rows in samples.items()}


def measure_costs(
    target: Runner, draft: Runner, ks: Sequence[int], context: int, batch: int = 1, rounds: int = 9
) -> Costs:
    """Costs of speculation on this device for one pair, one context and one batch.

    Args:
        target, draft: runners whose slabs hold the rows.
        ks: draft lengths to measure; 0 is added, and V between measured ks is interpolated.
        context, batch: the load.
        rounds: cycles for each k.

    Returns:
        T, V(k) at each k up to the largest, the draft line d0 + k*t (least squares), sampling and host medians.
    """
    ks = sorted({0, *ks})
    times = cycle_times(target, ModelDrafter(draft), ks, context, batch, rounds)
    t_ms, d0_ms = line([(k, times[k]["draft"]) for k in ks if k])
    with_draft = [times[k] for k in ks if k]
    return Costs(
        T_ms=times[0]["wall"],
        V_ms={k: interpolate(k, {j: times[j]["verify"] for j in ks}) for k in range(ks[-1] + 1)},
        t_ms=t_ms,
        d0_ms=d0_ms,
        S_ms=statistics.median(row["sampling"] for row in with_draft),
        H_ms=statistics.median(row["host"] for row in with_draft),
        context=context,
        batch=batch,
        device=str(target.device),
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares (slope, intercept); one point is a line through the origin, a negative intercept is set to 0."""
    if len(points) == 1:
        return points[0][1] / points[0][0], 0.0
    mean_x, mean_y = (statistics.mean(values) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    intercept = mean_y - slope * mean_x
    if intercept < 0:
        return sum(x * y for x, y in points) / sum(x * x for x, _ in points), 0.0
    return slope, intercept


def interpolate(x: int, table: dict[int, float]) -> float:
    """Value at x between the nearest measured points."""
    if x in table:
        return table[x]
    low, high = max(k for k in table if k < x), min(k for k in table if k > x)
    return table[low] + (table[high] - table[low]) * (x - low) / (high - low)


def prefix_kv(target: Runner, context: int, verify_ms: float, verify_short_ms: float, bandwidth: float) -> dict:
    """Two estimates of the time a verify pass spends on the prefix KV, in milliseconds.

    Args:
        target: its config gives the bytes.
        context: prefix tokens.
        verify_ms: V at this context.
        verify_short_ms: V at a context near 0.
        bandwidth: measured copy bandwidth, bytes per second.

    Returns:
        {"difference_ms", "bandwidth_ms"}; the third estimate is the fit's slope times the context.
    """
    nbytes = kv_bytes_per_token(target.config, target.dtype) * context
    return {"difference_ms": verify_ms - verify_short_ms, "bandwidth_ms": 1e3 * nbytes / bandwidth}
