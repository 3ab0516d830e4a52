"""What the device knows of a decoder's rows: read from their answers when rows come or go, moved past each cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine import noise
from engine.request import Answer
from engine.warp import Warp, draws_of


@dataclass(frozen=True)
class RowState:
    """Of B rows; those beyond the active ones fill a fixed shape: they do not grow, and what they emit is dropped.

    Attributes:
        last: [B, 2] the two newest tokens.
        length: [B] tokens so far (prompt and emitted).
        temperature: [B] the target's.
        keys: [B] the requests' noise keys.
        live: [B] 1 where the row is active, else 0.
        limit: [B] the length that ends the answer.
        drawn: numbers of the rows that are sampled.
        draws: what the temperatures are (`warp.draws_of`).
    """

    last: Tensor
    length: Tensor
    temperature: Tensor
    keys: Tensor
    live: Tensor
    limit: Tensor
    drawn: Tensor
    draws: str

    @staticmethod
    def of(answers: Sequence[Answer], num: int, device: torch.device) -> RowState:
        """The state of `num` rows, the first ones those of the answers (at least one)."""
        spare = num - len(answers)
        texts = [(*a.request.ids, *a.tokens) for a in answers] + [(0, 0)] * spare
        temperatures = [a.request.temperature for a in answers]
        temperatures += temperatures[:1] * spare
        drawn = [i for i, t in enumerate(temperatures) if not Warp(t).greedy]
        return RowState(
            torch.tensor([t[-2:] for t in texts], device=device, dtype=torch.long),
            torch.tensor([len(t) for t in texts], device=device, dtype=torch.long),
            torch.tensor(temperatures, device=device),
            torch.tensor([noise.request_key(a.request.id) for a in answers] + [0] * spare, device=device),
            torch.tensor([1] * len(answers) + [0] * spare, device=device),
            torch.tensor([len(a.request.ids) + a.request.max_new for a in answers] + [0] * spare, device=device),
            torch.tensor(drawn, device=device, dtype=torch.long),
            draws_of(temperatures),
        )

    def within(self, kept: RowState) -> RowState:
        """This state in the tensors of another one of as many rows, which graphs read and change in place."""
        for name in ("last", "length", "temperature", "keys", "live", "limit"):
            getattr(kept, name).copy_(getattr(self, name))
        return replace(kept, drawn=self.drawn, draws=self.draws)

    def cycle_keys(self, answers: list[Answer]) -> Tensor:
        """Noise keys [B] of these answers' next cycle alone, for the block rule; see `accept_block`."""
        cycles = [len(a.cycles) for a in answers] + [0] * (len(self.keys) - len(answers))
        return noise.fresh(self.keys, torch.tensor(cycles, device=self.keys.device))


def move_on(last: Tensor, length: Tensor, live: Tensor, tokens: Tensor, accepted: Tensor, final: Tensor) -> Tensor:
    """Takes the rows' state past a cycle, in place, and tells what each row emitted.

    Args:
        last: [B, 2] the two newest tokens; they become emitted[a - 1] (or the old newest one) and final.
        length: [B] grows by a + 1 where the row is live.
        live: [B] 1 or 0.
        tokens: [B, k] proposals.
        accepted, final: [B] of the acceptance rule.

    Returns:
        [B, k + 1]: the accepted proposals, then final; what stands behind it means nothing.
    """
    emitted = torch.cat([tokens, final[:, None]], 1).scatter(1, accepted[:, None], final[:, None])
    seen = torch.cat([last[:, 1:], emitted], 1)
    last.copy_(seen.gather(1, accepted[:, None] + torch.arange(2, device=seen.device)))
    length.add_((accepted + 1) * live)
    return emitted
