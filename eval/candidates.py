"""An arm as the choice sees it, and the order of arms. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.cells import Cell

# Arms whose objective is within this of the best are a tie.
TIE_FRAC = 0.005
TIE_RULE = (
    f"arms within {TIE_FRAC:.1%} of the best are tied; of these the lowest p95 end-to-end time wins, then the fewest "
    "parameters read per drafted token, then the smaller k, then the name"
)


@dataclass(frozen=True)
class Candidate:
    """An arm as the choice sees it.

    Attributes:
        value, low, high: the objective and its 95% interval.
        e2e_p95_ms: p95 over requests of end-to-end time.
        size: parameters read per drafted token; 0 for look-up and the baseline.
        alpha, tau: acceptance, shown and never ranked by.
        label: the arm in words, where the rows have one.
        chain: k proposals in a chain every cycle, the whole text seen (`records.is_chain`).
        ttft_ms, tpot_ms, e2e_ms: p50 and p95 over the arm's requests.
        slower_frac: requests that it made slower.
        throughput_speedup, tok_s: tokens a second over the baseline's, and as they are.
        equal_memory: the same over a baseline that has the draft's memory too, {rows, speedup}.
        load: context, batch, answer length and requests that the figures are of.
    """

    arm: str
    draft: str
    k: int
    value: float
    e2e_p95_ms: float
    size: int = 0
    low: float | None = None
    high: float | None = None
    alpha: float | None = None
    tau: float | None = None
    label: str = ""
    chain: bool = False
    ttft_ms: dict[str, float] | None = None
    tpot_ms: dict[str, float] | None = None
    e2e_ms: dict[str, float] | None = None
    slower_frac: float | None = None
    throughput_speedup: float | None = None
    equal_memory: dict[str, Any] | None = None
    tok_s: float | None = None
    load: dict[str, Any] | None = None


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best first, by the objective; ties by TIE_RULE.

    Args:
        candidates: the baseline (value 1) among them.

    Returns:
        all of them; only the first is decided by the tie rule, the rest follow by value.
    """
    if not candidates:
        return []
    best = max(c.value for c in candidates)
    tied = [c for c in candidates if c.value >= best * (1 - TIE_FRAC)]
    first = min(tied, key=lambda c: (c.e2e_p95_ms, c.size, c.k, c.arm))
    rest = [c for c in candidates if c is not first]
    return [first, *sorted(rest, key=lambda c: (-c.value, c.e2e_p95_ms, c.size, c.k, c.arm))]


def shown(cell: Cell | None) -> dict[str, Any]:
    """What a table shows beside the ranking's own figures."""
    if cell is None or cell["status"] != "ok":
        return {}
    load = {
        "context_tok": cell["context_tok"]["p50"],
        "batch": cell["batch"],
        "new_tok": cell["new_tok"]["p50"],
        "num_requests": cell["num_requests"],
    }
    return {
        "label": cell.get("label") or "",
        "chain": cell["chain"],
        **{name: cell[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "slower_frac", "throughput_speedup")},
        "equal_memory": cell["throughput_speedup_equal_memory"],
        "tok_s": cell["throughput_tok_s"],
        "load": load,
    }
