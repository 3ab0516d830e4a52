"""In which order the arms of a request run, and under which clocks. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eval.arms import Arm


@dataclass(frozen=True)
class Turn:
    """One request's place among those of its domain and group.

    Attributes:
        index: how many of them came before. Domains and groups come round in a run: counted over all of it, each would
            have one order, and some no request that is timed by phase.
        phased_every: every so many of them one is timed by phase too.
    """

    index: int
    phased_every: int

    def passes(self, arms: Sequence[Arm]) -> list[tuple[Arm, str]]:
        """Arm and clock of each run: arms forwards or backwards, the two clocks of an arm one after the other."""
        timed, skipped = divmod(self.index, self.phased_every)
        if skipped:
            bare_before = self.index - timed - 1
            return [(arm, "bare") for arm in (reversed(arms) if bare_before % 2 else arms)]
        clocks = ("phased", "bare") if timed // 2 % 2 else ("bare", "phased")
        return [(arm, clock) for arm in (reversed(arms) if timed % 2 else arms) for clock in clocks]


def next_turn(seen: Counter[tuple[str, str]], domain: str, group: str, phased_every: int) -> Turn:
    """The next turn of a domain and group, which is counted in `seen`."""
    seen[domain, group] += 1
    return Turn(seen[domain, group] - 1, phased_every)
