"""A row that keeps its first tokens and its most recent ones: which slot a position takes, and what a slot holds.

Nothing is moved or re-numbered: a key keeps the rotary position that it was written with. What a slot holds follows
from the row's newest position, so that rollback stays a smaller length.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453 (there positions are
counted inside of the cache; here they are those of the text, which a model trained on whole texts expects).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SINKS = 4
SLACK = 64  # slots beyond what is visible: as many as a cycle can write past the place where the next one starts
SMALLEST = 32  # recent tokens; a chain or a tree is up to 16 deep, and a shorter past is no text
MOST_SINKS = 256


@dataclass(frozen=True)
class Ring:
    """Slots 0 ... sinks - 1 hold the positions of the same number; the others are taken in turns.

    A query at position x sees the key at p when p <= x and (p < sinks or p > x - recent).

    Why there is slack: a rejected proposal at position m has overwritten the key of m - (slots - sinks), which its slot
    is then taken to hold. The next step starts at some x, and what it sees is over x - recent; so the mistake is never
    seen if m - x <= slots - sinks - recent. A chain of 16 leaves at most m = x + 15 behind, a tree of 64 proposals
    (whose last level is not read) x + 63, a piece of catching up x + 63.

    Attributes:
        sinks: first tokens that stay.
        recent: newest tokens that a query sees, itself included.
        slots: of a row.

    Raises:
        ValueError: a number out of its range.
    """

    sinks: int
    recent: int
    slots: int

    def __post_init__(self) -> None:
        if self.recent < SMALLEST:
            raise ValueError(
                f"recent is {self.recent}; a window must keep {SMALLEST} tokens or more: raise it, or None keeps all"
            )
        if not 0 <= self.sinks <= MOST_SINKS:
            raise ValueError(f"sinks is {self.sinks}; it must be 0 to {MOST_SINKS} first tokens: {SINKS} are enough")

    @classmethod
    def for_capacity(cls, sinks: int, recent: int, capacity: int) -> Ring:
        """The ring of rows of up to `capacity` positions: sinks + recent + 64 slots, or the capacity if it is less."""
        return cls(sinks, recent, min(capacity, sinks + recent + SLACK))

    @property
    def turn(self) -> int:
        """Slots that are taken in turns."""
        return self.slots - self.sinks

    @property
    def longest_step(self) -> int:
        """Tokens that one step may write. Rows that never come round, for want of capacity, have no such limit."""
        slack = self.turn - self.recent
        return slack + 1 if slack >= SLACK else self.slots

    def slot(self, position: Tensor) -> Tensor:
        """The slot of each position."""
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.turn)

    def held(self, newest: Tensor, slots: Tensor) -> Tensor:
        """The position whose key each slot holds: the largest one up to the row's newest that takes this slot.

        A slot that was never written is given its first position, which is over the newest, so that nobody sees it.

        Example: two sinks and four turning slots, newest 7: slots 0..5 hold 0 1 6 7 4 5.

        Args:
            newest: [B] newest position of each row.
            slots: [S].

        Returns:
            [B, S].
        """
        last = newest[:, None]
        return torch.where((slots < self.sinks) | (slots > last), slots, last - (last - slots) % self.turn)

    def kept(self, tokens: int, device: torch.device) -> Tensor:
        """Positions that stay of a text of so many tokens, more than there are slots."""
        stay = torch.arange(tokens - self.turn, tokens, device=device)
        return torch.cat([torch.arange(self.sinks, device=device), stay])


def sees(query: Tensor, there: Tensor, sliding: int | None, ring: Ring | None) -> Tensor:
    """Whether a query at one position sees a key at another: causal, in the layer's sliding window, in the ring's.

    Args:
        query, there: positions; broadcast.
        sliding: tokens that a sliding layer looks back; None sees all.
        ring: what the row keeps; None is all.
    """
    seen = there <= query
    if sliding is not None:
        seen &= there > query - sliding
    if ring is not None:
        seen &= (there < ring.sinks) | (there > query - ring.recent)
    return seen
