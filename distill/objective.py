"""What a draft is served for, and the losses that stand for it (`distill.objective`)."""

from __future__ import annotations

import re

from distill.fields import Loss

SAMPLING = re.compile(r"sampling(?:@(\d+(?:\.\d+)?))?")
LOWEST = 0.01  # temperature

# Greedy serving asks for the target's argmax alone; sampling accepts sum min(p, q), in which kl_tv, made for it, lies
# .007 below the forward KL from a cut draft (three seeds); docs/measured/training.md has the comparison.
NONE: dict[Loss, float] = {"forward_kl": 1.0}
GREEDY: dict[Loss, float] = {"forward_kl": 1.0, "cross_entropy": 0.5}
SAMPLED: dict[Loss, float] = {"forward_kl": 1.0}


def known(value: str) -> str:
    """Refuses what no losses stand for."""
    found = SAMPLING.fullmatch(value)
    if value != "greedy" and (found is None or float(found[1] or 1) < LOWEST):
        raise ValueError(f'= "{value}": allowed is greedy | sampling | sampling@T with a temperature T >= {LOWEST}')
    return value


def losses_of(objective: str | None) -> dict[Loss, float]:
    """Weights of the losses."""
    return dict(NONE if objective is None else GREEDY if objective == "greedy" else SAMPLED)


def temperature_of(objective: str | None) -> float:
    """Temperature of both distributions in the losses: that of serving, where it is named."""
    found = None if objective is None else SAMPLING.fullmatch(objective)
    return float(found[1] or 1) if found else 1.0
