"""A server's own speculation counters, in our definitions (docs/metrics.md). No torch.

vLLM, and llama-server with --metrics, count passes that verified a draft, drafted and accepted tokens, for the whole
server; llama-server also tells drafted and accepted tokens of each answer. None leaves out the pass that the end of an
answer cut, as our engine does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

TIMINGS = "llama-server timings"
COUNTERS = {"vllm": "vLLM counters", "llamacpp": "llama-server counters"}  # by the prefix of their names
_LINE = re.compile(r"^(vllm|llamacpp):spec_decode_(num_[a-z_]+?)(?:_total)?(\{.*\})?\s+([0-9.eE+-]+)(?:\s|$)")
_POSITION = re.compile(r'position="(\d+)"')
_NAMES = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Counters:
    """What a server counted since it started, or between two readings.

    Attributes:
        passes: verify passes that had a draft.
        drafted, accepted: tokens.
        by_position: accepted tokens at each position of the draft.
        source: which server's counters they are, of COUNTERS.
    """

    passes: float
    drafted: float
    accepted: float
    by_position: tuple[float, ...] = ()
    source: str = COUNTERS["vllm"]


def read_counters(text: str) -> Counters | None:
    """A server's counters out of a Prometheus page, summed over its engines; None when it does not speculate.

    Args:
        text: what /metrics shows.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    source = ""
    for line in text.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        source, name, labels, value = COUNTERS[found[1]], found[2], found[3] or "", float(found[4])
        if name == "num_accepted_tokens_per_pos" and (place := _POSITION.search(labels)):
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + value
        elif name in _NAMES:
            sums[name] = sums.get(name, 0.0) + value
    if any(name not in sums for name in _NAMES):
        return None
    passes, drafted, accepted = (sums[name] for name in _NAMES)
    return Counters(passes, drafted, accepted, tuple(positions[j] for j in sorted(positions)), source)


def between(before: Counters | None, after: Counters | None) -> Counters | None:
    """What was counted between two readings; None without both, or when the server started anew in between."""
    if before is None or after is None or after.drafted < before.drafted or after.passes < before.passes:
        return None
    earlier = before.by_position + (0.0,) * (len(after.by_position) - len(before.by_position))
    return Counters(
        after.passes - before.passes,
        after.drafted - before.drafted,
        after.accepted - before.accepted,
        tuple(late - early for late, early in zip(after.by_position, earlier)),
        after.source,
    )


def total(parts: Sequence[Counters | None]) -> Counters | None:
    """The sum of several spans; None when one of them is missing."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    width = max(len(part.by_position) for part in known)
    rows = [part.by_position + (0.0,) * (width - len(part.by_position)) for part in known]
    return Counters(
        sum(p.passes for p in known),
        sum(p.drafted for p in known),
        sum(p.accepted for p in known),
        tuple(sum(column) for column in zip(*rows)),
        known[0].source,
    )


def from_counters(counters: Counters | None) -> dict[str, Any] | None:
    """Acceptance by a server's counters: alpha = accepted / drafted, tau = 1 + accepted / passes.

    Passes without a draft are not in them, so tau is that of the drafted passes.

    Returns:
        source, alpha, tau, mean_accepted, num_cycles, drafted, accepted, accept_by_position (A_j over all passes, and
        c_j = A_j / A_(j-1)); None when nothing was drafted.
    """
    if counters is None or not counters.drafted or not counters.passes:
        return None
    reached = [counters.passes, *counters.by_position]
    return _acceptance(counters.source, counters.drafted, counters.accepted, counters.passes) | {
        "accept_by_position": [
            {"j": j, "A": now / counters.passes, "c": now / before if before else None}
            for j, (before, now) in enumerate(pairwise(reached), 1)
        ]
    }


def from_timings(timings: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Acceptance by llama-server's timings of each answer.

    It does not tell its passes: an answer's first token comes from the prefill, and each pass emits what it accepted
    and one token more, so passes = predicted_n - 1 - draft_n_accepted.

    Args:
        timings: of each answer; draft_n is missing where nothing was drafted.

    Returns:
        as `from_counters`, without positions; None when no answer tells of a draft.
    """
    told = [t for t in timings if "predicted_n" in t]
    drafted = sum(int(t.get("draft_n", 0)) for t in told)
    accepted = sum(int(t.get("draft_n_accepted", 0)) for t in told)
    passes = sum(int(t["predicted_n"]) - 1 for t in told) - accepted
    if not drafted or passes <= 0:
        return None
    return _acceptance(TIMINGS, drafted, accepted, passes) | {"accept_by_position": []}


def _acceptance(source: str, drafted: float, accepted: float, passes: float) -> dict[str, Any]:
    return {
        "source": source,
        "alpha": accepted / drafted,
        "tau": 1 + accepted / passes,
        "mean_accepted": accepted / passes,
        "num_cycles": round(passes),
        "drafted": round(drafted),
        "accepted": round(accepted),
    }
