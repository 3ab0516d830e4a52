"""Measured costs of real cycles: T, V(k), D(k), sampling, host gap, and the copy bandwidth of the device.

The cycles are the decoder's own, at a given context and batch, over slabs whose content does not matter for time; so
what is measured is what a request will pay, not a micro-benchmark of a part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention import Window, slab_attention
from engine.cache import Slab, bucket, kv_bytes_per_token
from engine.clock import phased
from engine.costs import Costs
from engine.draft import Drafter, ModelDrafter
from engine.graphs import Step
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from engine.tree import Tree
from engine.tree_cycle import TreeDecoder
from engine.tree_draft import TreeDrafter


def copy_bandwidth(device: torch.device | str = "cpu", nbytes: int | None = None, rounds: int = 7) -> float:
    """Bytes per second of a large copy, read and written bytes both counted.

    Args:
        device: where to copy.
        nbytes: size of the buffer; it must be far over the caches. None is 256 MiB, on CUDA 2 GiB.
        rounds: copies; the median counts.
    """
    size = nbytes or (1 << 31 if torch.device(device).type == "cuda" else 1 << 28)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * size / statistics.median(times_ms(lambda: target.copy_(source), source.device, rounds))


def times_ms(run: Callable[[], Any], device: torch.device, rounds: int, warm_ups: int = 1) -> list[float]:
    """Milliseconds of each of `rounds` calls: between CUDA events where there are any, else of the wall clock."""
    for _ in range(warm_ups):
        run()
    if device.type != "cuda":
        spans = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            spans.append((time.perf_counter() - start) * 1e3)
        return spans
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start_event, end_event in events:
        start_event.record()
        run()
        end_event.record()
    torch.cuda.synchronize()
    return [start_event.elapsed_time(end_event) for start_event, end_event in events]


@torch.inference_mode()
def attention_ms(
    kernel: str, device: torch.device, dtype: torch.dtype, batch: int, shape: tuple[int, int, int], tokens: int,
    context: int, num_layers: int = 1, rounds: int = 15,
) -> float:  # fmt: skip
    """Median milliseconds of one layer's attention of a step (captured on CUDA), its share of the mask included.

    Args:
        kernel: see `engine.kernels`.
        device, dtype: of the slab.
        batch: rows.
        shape: (query heads, KV heads, head width).
        tokens: tokens of each row in the step.
        context: tokens of each row after it.
        num_layers: layers of the slab, gone through in turn; together they must be far over the caches.
        rounds: steps measured.
    """
    heads, kv_heads, width = shape
    slab = Slab(num_layers, batch, kv_heads, bucket(context), width, dtype, device)
    _stir(slab)
    query = torch.randn(batch, heads, tokens, width, dtype=dtype, device=device)
    new = torch.randn(2, batch, kv_heads, tokens, width, dtype=dtype, device=device)
    start = torch.full((batch,), context - tokens, device=device)
    layers = [nn.Module() for _ in range(num_layers)]
    for index, layer in enumerate(layers):
        layer.layer_idx = index

    def run(query: Tensor, new: Tensor, start: Tensor) -> tuple[Tensor]:
        positions = start[:, None] + torch.arange(tokens, device=device)
        window = Window(slab, positions, bucket(context), kernel=kernel)
        out = [slab_attention(layer, query, new[0], new[1], None, window=window)[0] for layer in layers]
        return (out[-1],)

    step = Step(run, graph=device.type == "cuda")
    return statistics.median(times_ms(lambda: step((), query, new, start), device, rounds, 3)) / num_layers


def _stir(slab: Slab) -> None:
    """Random keys and values: products of zeros draw less power, so a GPU runs them at higher clocks."""
    for layer in (*slab.key, *slab.value):
        layer.normal_()


def cycle_times(
    target: Runner,
    drafter: Drafter | None,
    ks: Sequence[int],
    context: int,
    batch: int = 1,
    rounds: int = 9,
    graph: bool = False,
) -> dict[int, dict[str, float]]:
    """Median milliseconds of the phases of one cycle for each k, the ks interleaved round by round.

    Args:
        target: the target; its slab must hold `batch` rows of the context and 200 tokens more.
        drafter: what proposes; None measures k = 0 alone.
        ks: draft lengths, 0 for the baseline.
        context: tokens of each row when the cycle starts.
        batch: rows.
        rounds: measured cycles for each k, after two that warm up.
        graph: capture the target's steps (a model drafter is told so when it is made).

    Returns:
        {k: {"draft", "verify", "sampling", "host", "wall"}} in milliseconds.
    """
    decoders = {k: Decoder(target, (), drafter if k else None, k, clock=phased(target.device), graph=graph) for k in ks}
    return _times(decoders, context, batch, rounds)


def tree_times(
    target: Runner,
    drafter: TreeDrafter,
    trees: Sequence[Tree],
    ks: Sequence[int],
    context: int,
    rounds: int = 9,
    graph: bool = False,
) -> tuple[list[dict[str, float]], dict[int, dict[str, float]]]:
    """Median milliseconds of the phases of one cycle with each tree and of one with each chain, all interleaved.

    Args:
        target, context, rounds, graph: as in `cycle_times`, at batch 1; trees and their drafter are eager.
        drafter: proposes both.
        trees: trees of at least one proposal.
        ks: lengths of chains.

    Returns:
        a row for each tree, in their order, and a row for each k.
    """
    decoders: dict[int, Decoder] = {
        k: Decoder(target, (), drafter, k, clock=phased(target.device), graph=graph) for k in ks
    }
    # Trees are told from chains by keys below 0.
    decoders |= {-1 - i: TreeDecoder(target, (), drafter, t, clock=phased(target.device)) for i, t in enumerate(trees)}
    found = _times(decoders, context, 1, rounds)
    return [found[-1 - i] for i in range(len(trees))], {k: found[k] for k in ks}


def _times(decoders: Mapping[int, Decoder], context: int, batch: int, rounds: int) -> dict[int, dict[str, float]]:
    """Median milliseconds of the phases of a cycle of each decoder, over rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    for decoder in decoders.values():
        decoder.clear(context + 200)
    for decoder in decoders.values():
        config, device = decoder.target.config, decoder.target.device
        hidden = torch.zeros(config.hidden_size, dtype=decoder.target.dtype, device=device)
        for row in range(batch):
            ids = torch.randint(0, config.vocab_size, (context,), generator=generator).tolist()
            decoder.resume(Request(f"bench-{row}", tuple(ids), 1 << 20), hidden)
    samples: dict[int, list[dict[str, float]]] = {key: [] for key in decoders}
    for i in range(rounds + 2):
        for key, decoder in decoders.items():
            start = decoder.clock.now_ms()
            decoder.cycle()
            wall = decoder.clock.now_ms() - start
            phases = decoder.clock.totals_ms()
            if i >= 2:
                samples[key].append({**phases, "host": wall - sum(phases.values()), "wall": wall})
    names = ("draft", "verify", "sampling", "host", "wall")
    return {k: {n: statistics.median(s.get(n, 0.0) for s in rows) for n in names} for k, rows in samples.items()}


def measure_costs(
    target: Runner,
    draft: Runner,
    ks: Sequence[int],
    contexts: Sequence[int],
    batch: int = 1,
    rounds: int = 9,
    name: str = "",
    graph: bool = False,
) -> list[Costs]:
    """Costs of speculation on this device for one pair: one entry a context.

    Args:
        target, draft: runners whose slabs hold `batch` rows of the longest context and 200 tokens more.
        ks: draft lengths to measure; 0 is added, and V between measured ks is interpolated.
        contexts: tokens of each row.
        batch: rows.
        rounds: cycles for each k and context.
        name: the draft's name in the plan.
        graph: measure captured cycles, and of eager ones the draft's time a token alone.

    Returns:
        T, V(k) up to the largest k, the draft line d0 + k*t (least squares), sampling and host medians, three estimates
        of the prefix KV's part of a verify pass and of a draft step, and the share of the copy bandwidth that a single
        step reaches.
    """
    ks = sorted({0, *ks})
    drafter = ModelDrafter(draft, graph=graph)
    bandwidth = copy_bandwidth(target.device)
    if target.device.type == "cuda":
        _stir(target.slab)
        _stir(draft.slab)
    near_zero = 16
    table = {c: cycle_times(target, drafter, ks, c, batch, rounds, graph) for c in sorted({near_zero, *contexts})}
    slope = _context_slope([(k, c, times[k]["verify"]) for c, times in table.items() for k in ks], batch)
    # A draft step at each context; a window holds no more of it than its newest tokens.
    steps = {c: line([(k, times[k]["draft"]) for k in ks if k])[0] for c, times in table.items()}
    most = max(contexts) if draft.slab.ring is None else draft.slab.ring.recent
    step_slope = line([(min(c, most), step) for c, step in steps.items()])[0] / batch
    draft_kv_bytes = kv_bytes_per_token(draft.config, draft.dtype)
    found = []
    for context in contexts:
        times = table[context]
        t_ms, d0_ms = line([(k, times[k]["draft"]) for k in ks if k])
        held = min(context, most) * batch
        eager = cycle_times(target, ModelDrafter(draft), ks[1:], context, batch, rounds) if graph else times
        kv_bytes = kv_bytes_per_token(target.config, target.dtype) * context * batch
        drafting = [times[k] for k in ks if k] or [times[0]]
        found.append(
            Costs(
                T_ms=times[0]["wall"],
                V_ms={k: interpolate(k, {j: times[j]["verify"] for j in ks}) for k in range(ks[-1] + 1)},
                t_ms=t_ms,
                d0_ms=d0_ms,
                S_ms=statistics.median(row["sampling"] for row in drafting),
                H_ms=statistics.median(row["host"] for row in drafting),
                context=context,
                batch=batch,
                device=str(target.device),
                draft=name,
                t_eager_ms=line([(k, eager[k]["draft"]) for k in ks if k])[0],
                t_graph_ms=t_ms if graph else None,
                prefix_kv_ms={
                    "fit": max(0.0, slope * context * batch),
                    "difference": statistics.median(times[k]["verify"] - table[near_zero][k]["verify"] for k in ks),
                    "bandwidth": 1e3 * kv_bytes / bandwidth,
                },
                draft_prefix_kv_ms={
                    "fit": step_slope * held,
                    "difference": steps[context] - steps[near_zero],
                    "bandwidth": 1e3 * draft_kv_bytes * held / bandwidth,
                },
                bandwidth_frac=(target.weight_bytes + kv_bytes) / (times[0]["verify"] / 1e3) / bandwidth,
            )
        )
    return found


def _context_slope(points: Sequence[tuple[int, int, float]], batch: int) -> float:
    """c2 of V = c0 + c1*B*(k+1) + c2*sum(ctx), by least squares; milliseconds per token of context."""
    rows = torch.tensor([[1.0, batch * (k + 1.0), float(batch * c)] for k, c, _ in points], dtype=torch.float64)
    times = torch.tensor([[v] for _, _, v in points], dtype=torch.float64)
    return float(torch.linalg.lstsq(rows, times).solution[2])


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares (slope, intercept), neither below 0.

    One point gives a line through the origin, as does a negative intercept; a slope below 0, which only noise gives, is
    a constant.
    """
    if not points:
        return 0.0, 0.0
    if len(points) == 1:
        return points[0][1] / points[0][0], 0.0
    mean_x, mean_y = (statistics.mean(values) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    intercept = mean_y - slope * mean_x
    if slope < 0:
        return 0.0, mean_y
    if intercept < 0:
        return sum(x * y for x, y in points) / sum(x * x for x, _ in points), 0.0
    return slope, intercept


def interpolate(x: int, table: dict[int, float]) -> float:
    """Value at x between the nearest measured points."""
    if x in table:
        return table[x]
    low, high = max(k for k in table if k < x), min(k for k in table if k > x)
    return table[low] + (table[high] - table[low]) * (x - low) / (high - low)
