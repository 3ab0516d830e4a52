"""From acceptance at each position of a text to the cycles that speculation would need for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cycles:
    """What drafting k tokens a cycle would have done, summed over texts; expectations where acceptance is random.

    Attributes:
        k: tokens drafted a cycle.
        num: cycles that were not cut by the end of a text.
        reached: [k] how many of them accepted at least 1, 2, ... k tokens.
    """

    k: int
    num: float
    reached: tuple[float, ...]

    @property
    def tau(self) -> float | None:
        """Tokens a cycle, the correction or bonus token included; None without a whole cycle."""
        return 1 + sum(self.reached) / self.num if self.num else None

    @property
    def alpha(self) -> float | None:
        """Accepted / drafted; None without a whole cycle."""
        return sum(self.reached) / (self.k * self.num) if self.num else None

    @property
    def conditional(self) -> list[float]:
        """c_j = P(j-th accepted, given that the first j-1 were); 0 where nothing got so far."""
        before = (self.num, *self.reached)
        return [after / first if first else 0.0 for first, after in zip(before, self.reached)]


def count_cycles(texts: Iterable[Sequence[float]], k: int) -> Cycles:
    """Walks each text in cycles: a cycle at t accepts tokens until the first rejection, the next starts behind it.

    With v_t the chance that a cycle starts at t and s_j = prod_{i<j} accept_{t+i},
        v_{t+a+1} += v_t * (s_a - s_{a+1}) for a < k,  v_{t+k+1} += v_t * s_k,  v_0 = 1.
    For greedy decoding accept is 0 or 1 and this is exactly what the engine does on the same text. A cycle that the
    end of the text would cut is left out, as in the measured acceptance.

    Args:
        texts: for each text, the chance that the draft's token at each position is accepted.
        k: tokens drafted a cycle, at least 1.

    Returns:
        Sums over all texts.
    """
    num, reached = 0.0, np.zeros(k)
    for text in texts:
        accept = np.asarray(text, dtype=np.float64)
        start = np.zeros(len(accept) + 1)
        start[0] = 1.0
        for t in range(len(accept) - k):
            if start[t] == 0.0:
                continue
            survive = np.cumprod(accept[t : t + k])
            num += start[t]
            reached += start[t] * survive
            stop = np.concatenate(([1.0], survive)) - np.concatenate((survive, [0.0]))
            start[t + 1 : t + k + 2] += start[t] * stop
    return Cycles(k, float(num), tuple(float(value) for value in reached))
