"""A policy on recorded answers: what it would propose and what that would cost, free of a machine's noise. No torch.

With greedy decoding the text does not depend on the draft, and how many tokens a draft gets right from any place on is
a property of the text: the length of the run of tokens that it would have said too. So one recording serves every k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from engine.costs import Costs, cycle_ms
from engine.policy import Policy


@dataclass(frozen=True)
class Trace:
    """One answer.

    Attributes:
        request, domain: names.
        context: prompt tokens.
        right: for each answer token, would the draft have said it after the tokens before?
    """

    request: str
    domain: str
    context: int
    right: tuple[bool, ...]


def replay_ms(trace: Trace, costs: Costs, how: int | Policy) -> float:
    """Decode time of one answer after its first token, which the prefill gives.

    Args:
        trace: the answer.
        costs: what cycles cost.
        how: a fixed k (0 is the baseline), or a policy, which learns from it.
    """
    at, spent, num = 1, 0.0, len(trace.right)
    while at < num:
        wanted = how if isinstance(how, int) else how.choose([trace.request], trace.context + at)
        k = min(wanted, num - at - 1)
        kept = 0
        while kept < k and trace.right[at + kept]:
            kept += 1
        ms = cycle_ms(costs, k) if k else costs.T_ms
        spent += ms
        if not isinstance(how, int):
            how.observe(trace.request, k, kept)
            how.took(k, 1, trace.context + at, ms)
        at += kept + 1
    if not isinstance(how, int):
        how.forget(trace.request)
    return spent


def speedup(traces: Sequence[Trace], costs: Costs, how: int | Policy) -> float:
    """Baseline time over this one's, all answers one after another."""
    return sum(replay_ms(t, costs, 0) for t in traces) / sum(replay_ms(t, costs, how) for t in traces)


def mixed(traces: Sequence[Trace]) -> list[Trace]:
    """The domains in turns, as a mixed stream brings them."""
    by_domain = [[t for t in traces if t.domain == d] for d in dict.fromkeys(t.domain for t in traces)]
    return [t for turn in zip_longest(*by_domain) for t in turn if t is not None]
