"""Acceptance by given rates, to measure what a system costs apart from how good a draft is.

What it writes is NOT the target's text. Nothing that is distilled, released or shown as an answer may come from here:
answers say so themselves (`Answer.simulated`), and they end by length alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import noise
from engine.accept import with_room
from engine.clock import Clock
from engine.cycle import positions_of
from engine.draft import LookupDrafter, ModelDrafter
from engine.model import Runner
from engine.policy import Policy
from engine.request import Answer, Request
from engine.row_state import move_on
from engine.speculate import Decoder


class SimulatedDecoder(Decoder):
    """A `Decoder` that drafts, verifies and judges as ever, and then keeps as many proposals as the rates say.

    The real rule runs for its time, on copies of the rows' state; its decision is dropped. The draws are counter-based:
    a request accepts alike alone, in a batch and in every repeat, and longer blocks meet the draws of shorter ones.

    Args:
        target, k, seed, top_k, top_p, clock, rule, policy, graph: as in `Decoder`.
        drafter: of a model; what a look-up finds depends on the text.
        accept: chance that the first proposal is accepted, the second given the first, ...; further places take the
            last one's.

    Raises:
        ValueError: no rate or one out of 0..1; a look-up; what `Decoder` refuses.
    """

    def __init__(
        self,
        target: Runner,
        drafter: ModelDrafter,
        k: int,
        accept: Sequence[float],
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        clock: Clock | None = None,
        rule: str = "token",
        policy: Policy | None = None,
        graph: bool = False,
    ) -> None:
        if isinstance(drafter, LookupDrafter):
            raise ValueError("simulated acceptance: a look-up proposes by the text, which is not real; use a draft")
        self._rates = torch.tensor(positions_of(list(accept), k), device=target.device, dtype=torch.float64)
        super().__init__(target, (), drafter, k, seed, top_k, top_p, clock, rule=rule, policy=policy, graph=graph)

    def resume(self, request: Request, hidden: Tensor, read: bool = True) -> Answer:
        """As `Decoder.resume`; the answer is marked."""
        answer = super().resume(request, hidden, read)
        answer.simulated = True
        return answer

    def _run_accept(
        self, draws: str, logits: Tensor, last: Tensor, length: Tensor, temperature: Tensor, keys: Tensor,
        live: Tensor, limit: Tensor, drawn: Tensor, tokens: Tensor, q: Tensor | None, rows: Tensor | None,
        count: Tensor | None,
    ) -> tuple[Tensor]:  # fmt: skip
        """As `Decoder._run_accept`, with the rates in place of the judgement."""
        (judged,) = super()._run_accept(
            draws, logits, last.clone(), length.clone(), temperature, keys, live, limit, drawn, tokens, q, rows, count
        )
        place = torch.arange(tokens.shape[1], device=tokens.device)
        room = with_room(length, limit, tokens.shape[1], count)
        drawn_at = noise.uniform(self.seed, keys[:, None], length[:, None] + place, noise.ACCEPT)
        keep = (drawn_at < self._rates[: len(place)]) & (place < room[:, None])
        accepted = keep.long().cumprod(1).sum(1)
        # The token that the real rule would have put behind its own count: some token of the target.
        final = judged.gather(1, judged[:, 1:2] + 2)[:, 0]
        emitted = move_on(last, length, live, tokens, accepted, final)
        return (torch.cat([room[:, None], accepted[:, None], emitted], 1),)
