"""Measured costs -> predicted speedup, break-even acceptance, ceiling, best k, waterfall. Pure arithmetic, no torch.

The cycle itself (`Costs`, `tau`, `cycle_ms`, `decode_ms`) is in `engine.cycle` and importable from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.cycle import (
    MAX_K,
    Accept,
    Costs,
    cycle_ms,
    decode_ms,
    draft_ms,
    positions_of,
    scaled,
    tau,
    tau_by_position,
    verify_ms,
)

__all__ = [
    "MAX_K",
    "Accept",
    "Ceiling",
    "Costs",
    "Step",
    "best_k",
    "break_even_alpha",
    "ceiling",
    "costs_for",
    "cycle_ms",
    "decode_ms",
    "draft_ms",
    "needed_tau",
    "predicted_speedup",
    "scaled",
    "tau",
    "tau_by_position",
    "verify_ms",
    "waterfall",
]


@dataclass(frozen=True)
class Ceiling:
    """What a perfect draft (every token accepted) that costs nothing would give, at the best measured k.

    Attributes:
        s: part of the baseline's request time that such a draft removes.
        speedup: 1 / (1 - s).
        k: where it is reached; 0 when no k helps.
    """

    s: float
    speedup: float
    k: int


@dataclass(frozen=True)
class Step:
    """One bar of the waterfall: the speedup left after paying for `name`, and what that took off the bar before."""

    name: str
    speedup: float
    loss: float


def predicted_speedup(
    costs: Costs,
    k: int,
    accept: Accept,
    prefill_ms: float = 0.0,
    draft_prefill_ms: float = 0.0,
    new_tok: int | None = None,
) -> float:
    """Baseline time over speculation's, from measured costs and an acceptance.

    Args:
        costs: measured costs.
        k: proposals a cycle; 0 is the baseline and gives 1.
        accept: acceptance, one or by position.
        prefill_ms: the target's prefill, which both pay.
        draft_prefill_ms: the draft's prefill, which only speculation pays.
        new_tok: answer tokens, the first from the prefill; None is a long answer (prefill then plays no part).

    Returns:
        speedup; above 1 is faster.

    Raises:
        ValueError: an acceptance out of 0..1, k that was not measured, or new_tok below 1.
    """
    if k == 0:
        return 1.0
    if new_tok is None:
        return tau_by_position(positions_of(accept, k)) * costs.T_ms / cycle_ms(costs, k)
    if new_tok < 1:
        raise ValueError(f"new_tok is {new_tok}; an answer has at least 1 token")
    base = prefill_ms + costs.T_ms * (new_tok - 1)
    spent = prefill_ms + draft_prefill_ms + decode_ms(costs, k, accept, new_tok - 1)
    return base / spent if spent > 0 else 1.0


def break_even_alpha(
    costs: Costs, k: int, prefill_ms: float = 0.0, draft_prefill_ms: float = 0.0, new_tok: int | None = None
) -> float | None:
    """The smallest acceptance at which speculation with k is not slower than the baseline.

    Args:
        costs: measured costs.
        k: proposals a cycle, at least 1.
        prefill_ms, draft_prefill_ms, new_tok: as in `predicted_speedup`.

    Returns:
        acceptance in 0..1, or None when even acceptance 1 does not pay.
    """

    def gain(alpha: float) -> float:
        return predicted_speedup(costs, k, alpha, prefill_ms, draft_prefill_ms, new_tok)

    if gain(1.0) < 1.0:
        return None
    low, high = 0.0, 1.0
    if gain(low) >= 1.0:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) >= 1.0 else (middle, high)
    return high


def needed_tau(costs: Costs, k: int, speedup: float) -> float | None:
    """Acceptance length that a decode speedup takes at k: speedup * cycle(k) / T; None when it is above k + 1."""
    needed = speedup * cycle_ms(costs, k) / costs.T_ms
    return needed if needed <= k + 1 else None


def ceiling(costs: Costs, prefill_ms: float = 0.0, new_tok: int | None = None) -> Ceiling:
    """What no draft can beat here: every token accepted, no draft time, best measured k; V, S, H and prefill stay.

    Args:
        costs: measured costs.
        prefill_ms: the target's prefill.
        new_tok: answer tokens, the first from the prefill; None is a long answer.

    Returns:
        s, the ceiling 1 / (1 - s), and its k.
    """
    rest = 1.0 if new_tok is None else float(new_tok - 1)
    prefill = 0.0 if new_tok is None else prefill_ms
    base = prefill + costs.T_ms * rest
    best = Ceiling(0.0, 1.0, 0)
    if base <= 0:
        return best
    for k in costs.ks:
        spent = prefill + rest * (verify_ms(costs, k) + costs.S_ms + costs.H_ms) / (k + 1)
        if spent < base * (1.0 - best.s):
            best = Ceiling(1.0 - spent / base, base / spent, k)
    return best


def best_k(
    costs: Costs,
    accept: Accept,
    ks: Iterable[int] | None = None,
    prefill_ms: float = 0.0,
    draft_prefill_ms: float = 0.0,
    new_tok: int | None = None,
) -> tuple[int, float]:
    """The draft length with the highest predicted speedup; (0, 1.0) when none beats the baseline.

    Args:
        costs: measured costs.
        accept: acceptance, one or by position.
        ks: candidates; None takes the measured ones.
        prefill_ms, draft_prefill_ms, new_tok: as in `predicted_speedup`.

    Returns:
        k and its predicted speedup; of equal ones the smaller k.
    """
    best = (0, 1.0)
    for k in sorted(costs.ks if ks is None else ks):
        gain = predicted_speedup(costs, k, accept, prefill_ms, draft_prefill_ms, new_tok)
        if gain > best[1]:
            best = (k, gain)
    return best


def waterfall(
    tau: float,
    T_ms: float,
    V_ms: float,
    D_ms: float,
    S_ms: float,
    H_ms: float,
    end_to_end: float,
) -> list[Step]:
    """Where the acceptance length goes: tau -> tau*T/V -> tau*T/(V+D) -> tau*T/(V+D+S+H) -> end to end.

    Args:
        tau: tokens a cycle.
        T_ms: baseline time a token.
        V_ms, D_ms, S_ms, H_ms: verify, draft, sampling and host time of a cycle.
        end_to_end: speedup with both prefills.

    Returns:
        five steps; each one's loss is what it took off the bar before.
    """
    bars = [
        ("tokens per cycle", tau),
        ("after verify", tau * T_ms / V_ms),
        ("after draft", tau * T_ms / (V_ms + D_ms)),
        ("after sampling and host", tau * T_ms / (V_ms + D_ms + S_ms + H_ms)),
        ("end to end", end_to_end),
    ]
    return [Step(name, value, 0.0 if i == 0 else bars[i - 1][1] - value) for i, (name, value) in enumerate(bars)]


def costs_for(plan: Mapping[str, Any], draft: str, context: int, batch: int = 1) -> Costs | None:
    """The plan's costs of a draft at the nearest measured context.

    Args:
        plan: plan.json, whose `costs` is a list of `Costs.to_json()`.
        draft: its name there.
        context: tokens.
        batch: rows; only costs measured at this batch are taken.

    Returns:
        the costs, or None when the plan has none of this draft at this batch.
    """
    found = [Costs.from_json(c) for c in plan.get("costs", []) if c.get("draft", "") == draft]
    found = [c for c in found if c.batch == batch]
    return min(found, key=lambda c: abs(c.context - context), default=None)
