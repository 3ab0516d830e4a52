"""Paired speedups over the baseline: one pair a request, intervals over requests. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.bootstrap import Floats, Ints, statistic_interval
from eval.records import RequestRow
from eval.stats import bare, by_request

OBJECTIVES = ("latency@p50", "latency@p95")


@dataclass(frozen=True)
class Pair:
    """One request under the baseline and under an arm; times are geometric means over repeats.

    Attributes:
        base_ms: baseline end to end.
        arm_ms: the arm's end to end, for as many tokens as the baseline wrote.
        speedup: base_ms / arm_ms.
        same_text: both wrote the same tokens.
    """

    request_id: str
    domain: str
    context_tok: int
    new_tok: int
    base_ms: float
    arm_ms: float
    speedup: float
    same_text: bool


def pair(baseline: Sequence[RequestRow], arm: Sequence[RequestRow]) -> list[Pair]:
    """Pairs the bare rows of each request that both have.

    Where the two wrote different numbers of tokens (sampling, or ties in low precision) time per token is compared.
    """
    theirs = by_request(bare(arm))
    pairs = []
    for request_id, base in by_request(bare(baseline)).items():
        rows = theirs.get(request_id)
        if not rows:
            continue
        per_token = [np.log(r.e2e_ms / r.new_tok) for r in base], [np.log(r.e2e_ms / r.new_tok) for r in rows]
        gain = float(np.exp(np.mean(per_token[0]) - np.mean(per_token[1])))
        base_ms = float(np.exp(np.mean([np.log(r.e2e_ms) for r in base])))
        same = {r.tokens_sha for r in base} == {r.tokens_sha for r in rows}
        one = base[0]
        pairs.append(Pair(request_id, one.domain, one.context_tok, one.new_tok, base_ms, base_ms / gain, gain, same))
    return pairs


def objective_values(base_ms: Floats, speedup: Floats, objective: str) -> Floats:
    """The objective over the last axis: the median of paired speedups, or p95 of baseline time over p95 of arm time.

    Args:
        base_ms, speedup: [..., requests].
        objective: "latency@p50" or "latency@p95".

    Raises:
        ValueError: another objective.
    """
    if objective == "latency@p50":
        return np.asarray(np.median(speedup, axis=-1))
    if objective == "latency@p95":
        slow_base, slow_arm = np.percentile(base_ms, 95, axis=-1), np.percentile(base_ms / speedup, 95, axis=-1)
        return np.asarray(slow_base / slow_arm)
    raise ValueError(f"objective is {objective!r}; allowed are {', '.join(OBJECTIVES)}")


def latency_speedup(pairs: Sequence[Pair], objective: str, times: int = 2000, seed: int = 0) -> dict[str, Any] | None:
    """Paired speedups: gmean, p5, p50, p95, the interval of the median, the objective with its interval.

    Args:
        pairs: one per request.
        objective: what the choice goes by.
        times, seed: of the bootstrap over requests.

    Returns:
        the figures, `slower_frac` (share of requests made slower) and `total` (all requests together); None without.
    """
    if not pairs:
        return None
    base, gain = np.array([p.base_ms for p in pairs]), np.array([p.speedup for p in pairs])

    def of(name: str) -> tuple[float | None, float | None]:
        def statistic(index: Ints) -> Floats:
            return objective_values(base[index], gain[index], name)

        return statistic_interval(len(pairs), statistic, times, seed) or (None, None)

    low, high = of("latency@p50")
    goal_low, goal_high = of(objective)
    p5, p50, p95 = np.percentile(gain, [5, 50, 95])
    return {
        "gmean": float(np.exp(np.log(gain).mean())),
        "p5": float(p5),
        "p50": float(p50),
        "p95": float(p95),
        "ci_low": low,
        "ci_high": high,
        "slower_frac": float((gain < 1).mean()),
        "total": float(base.sum() / (base / gain).sum()),
        "objective": float(objective_values(base, gain, objective)),
        "objective_low": goal_low,
        "objective_high": goal_high,
    }


def realised_frac(speedup: float, ceiling: float) -> float | None:
    """(speedup - 1) / (ceiling - 1); None where the ceiling leaves nothing to gain."""
    return (speedup - 1) / (ceiling - 1) if ceiling > 1 else None
