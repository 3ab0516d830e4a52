"""What one propose-verify cycle costs and emits. Pure arithmetic, no torch.

A cycle that proposes k tokens costs D(k) + V(k) + S + H, with D(k) = d0 + k*t, and emits tau tokens on average. The
baseline pays T for each token. All times are milliseconds; "accept" is one acceptance for every position or the list of
conditional ones (c_1, c_2, ...), beyond whose end the last one is held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

MAX_K = 16
# Answers up to this length are summed cycle by cycle.
EXACT_TOK = 256
Accept = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What one step of each part costs for one draft at one shape on one device.

    Attributes:
        T_ms: baseline time a token, same engine with k = 0.
        V_ms: verify time of a pass over k proposals and the newest token, by k (0..16).
        t_ms: draft time a token (the slope of D(k)).
        d0_ms: draft time a cycle that does not depend on k.
        S_ms: accept rule, sampling and bookkeeping, a cycle.
        H_ms: host gap, a cycle.
        context: tokens in the cache.
        batch: rows.
        device: in words.
        draft: whose t this is; a plan may hold several.
        t_eager_ms, t_graph_ms: t in each mode; None where it was not measured (graph: no CUDA).
        prefix_kv_ms: the part of one verify pass that reads the prefix KV, by way of estimating it.
        draft_prefix_kv_ms: the same part of one draft step.
        bandwidth_frac: (weights + KV bytes of one target pass) / its time / measured copy bandwidth.

    Raises:
        ValueError: a cost that is negative, not finite, or k out of 0..16.
    """

    T_ms: float
    V_ms: dict[int, float]
    t_ms: float
    d0_ms: float = 0.0
    S_ms: float = 0.0
    H_ms: float = 0.0
    context: int = 0
    batch: int = 1
    device: str = ""
    draft: str = ""
    t_eager_ms: float | None = None
    t_graph_ms: float | None = None
    prefix_kv_ms: dict[str, float] | None = None
    bandwidth_frac: float | None = None
    draft_prefix_kv_ms: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.T_ms) and self.T_ms > 0):
            raise ValueError(
                f"costs of {self.draft or 'the draft'}: T_ms is {self.T_ms}; it must be finite and above 0"
            )
        for name in ("t_ms", "d0_ms", "S_ms", "H_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"costs of {self.draft or 'the draft'}: {name} is {value}; it must be finite and >= 0")
        if not self.V_ms:
            raise ValueError(f"costs of {self.draft or 'the draft'}: V_ms is empty; measure verify for at least one k")
        for k, value in self.V_ms.items():
            if not 0 <= k <= MAX_K:
                raise ValueError(f"costs of {self.draft or 'the draft'}: V_ms has k = {k}; allowed are 0..{MAX_K}")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"costs of {self.draft or 'the draft'}: V_ms[{k}] is {value}; it must be above 0")

    @property
    def ks(self) -> list[int]:
        """Draft lengths that were measured, 0 left out, rising."""
        return sorted(k for k in self.V_ms if k > 0)

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can hold (the k of V_ms as text), as in plan.json under `costs`."""
        return {**asdict(self), "V_ms": {str(k): v for k, v in sorted(self.V_ms.items())}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Costs:
        """The inverse of `to_json`.

        Raises:
            ValueError: a key that is missing or unknown, named.
        """
        known = {f.name for f in fields(cls)}
        unknown, missing = set(data) - known, {"T_ms", "V_ms", "t_ms"} - set(data)
        if unknown or missing:
            raise ValueError(
                f"costs of {data.get('draft') or 'the draft'}: unknown keys {sorted(unknown)}, "
                f"missing keys {sorted(missing)}; allowed are {sorted(known)}"
            )
        return cls(**{**data, "V_ms": {int(k): float(v) for k, v in data["V_ms"].items()}})


def positions_of(accept: Accept, k: int) -> list[float]:
    """Conditional acceptances c_1..c_k; further places take the last one's.

    Raises:
        ValueError: none given, or one out of 0..1.
    """
    given = [float(accept)] if isinstance(accept, int | float) else [float(c) for c in accept]
    if not given:
        raise ValueError("no acceptance given; pass a number or at least one position")
    for c in given:
        if not 0.0 <= c <= 1.0:
            raise ValueError(f"acceptance is {c}; it must lie in 0..1")
    return (given + [given[-1]] * k)[:k]


def tau(alpha: float, k: int) -> float:
    """Tokens a cycle for one acceptance at every position: (1 - alpha^(k+1)) / (1 - alpha).

    Args:
        alpha: acceptance, 0..1.
        k: proposals a cycle.

    Returns:
        tokens, the correction or bonus token included.

    Source: Leviathan et al., arXiv 2211.17192, eq. 1.
    """
    return tau_by_position(positions_of(alpha, k))


def tau_by_position(positions: Sequence[float]) -> float:
    """Tokens a cycle from conditional acceptances: 1 + c_1 + c_1*c_2 + ...

    Args:
        positions: c_j = P(token j accepted | those before it were).

    Returns:
        tokens, the correction or bonus token included.
    """
    total, all_before = 1.0, 1.0
    for c in positions:
        all_before *= c
        total += all_before
    return total


def verify_ms(costs: Costs, k: int) -> float:
    """V(k): measured, or on the line between the measured neighbours; V(0) is T when it was not measured.

    Args:
        costs: measured costs.
        k: proposals.

    Returns:
        milliseconds of one pass.

    Raises:
        ValueError: k is above every measured one.
    """
    table = costs.V_ms if 0 in costs.V_ms else {0: costs.T_ms, **costs.V_ms}
    if k in table:
        return table[k]
    below = [j for j in table if j < k]
    above = [j for j in table if j > k]
    if not below or not above:
        raise ValueError(f"V({k}) is outside the measured k {sorted(table)}; measure it, or choose k among these")
    low, high = max(below), min(above)
    return table[low] + (table[high] - table[low]) * (k - low) / (high - low)


def draft_ms(costs: Costs, k: int) -> float:
    """D(k) = d0 + k*t; nothing is drafted at k = 0."""
    return costs.d0_ms + k * costs.t_ms if k else 0.0


def cycle_ms(costs: Costs, k: int) -> float:
    """D(k) + V(k) + S + H, the time of one cycle in milliseconds."""
    return draft_ms(costs, k) + verify_ms(costs, k) + costs.S_ms + costs.H_ms


def decode_ms(costs: Costs, k: int, accept: Accept, num_tok: int) -> float:
    """Expected time to emit num_tok tokens, the shorter last cycles included.

    E(r) = cycle(k') + sum_a P(a) * E(r - a - 1) with k' = min(k, r - 1), because no cycle proposes more than is left.

    Args:
        costs: measured costs.
        k: proposals a cycle.
        accept: acceptance, one or by position.
        num_tok: tokens to emit after the one that the prefill gives.

    Returns:
        milliseconds.
    """
    positions = positions_of(accept, k) if k else []
    # chance[j][a]: a of j proposals are accepted.
    chance = []
    for j in range(k + 1):
        kept = [1.0]
        for c in positions[:j]:
            kept.append(kept[-1] * c)
        chance.append([kept[a] - (kept[a + 1] if a < j else 0.0) for a in range(j + 1)])
    cycle = [cycle_ms(costs, j) for j in range(k + 1)]
    # Far from the end E grows by one whole cycle for tau tokens (renewal theorem). Whole blocks are skipped, so that it
    # also holds at acceptance 1, where E is periodic.
    skipped = max(0, num_tok - EXACT_TOK) // (k + 1) * (k + 1)
    expected = [0.0]
    for r in range(1, num_tok - skipped + 1):
        j = min(k, r - 1)
        expected.append(cycle[j] + sum(p * expected[r - a - 1] for a, p in enumerate(chance[j])))
    return expected[-1] + skipped * cycle[k] / tau_by_position(positions)


def scaled(costs: Costs, draft: float = 1.0, verify: float = 1.0, sampling: float = 1.0, host: float = 1.0) -> Costs:
    """The same costs with some parts multiplied, to ask "what if": `scaled(costs, draft=0.5)` halves draft time."""
    return replace(
        costs,
        t_ms=costs.t_ms * draft,
        d0_ms=costs.d0_ms * draft,
        V_ms={k: v * verify for k, v in costs.V_ms.items()},
        S_ms=costs.S_ms * sampling,
        H_ms=costs.H_ms * host,
    )
