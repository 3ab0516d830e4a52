"""A request, what came of it, and its rounds: plain data, the same for every decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.warp import Warp


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Attributes:
        id: names the request; its noise depends on it.
        ids: prompt tokens, at least one.
        max_new: answer tokens at most, at least one.
        temperature: of the target for this request.
    """

    id: str
    ids: tuple[int, ...]
    max_new: int
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError(f"request {self.id}: the prompt has no token")
        if self.max_new < 1:
            raise ValueError(f"request {self.id}: max_new is {self.max_new}; at least 1 token must be asked for")
        Warp(self.temperature)


@dataclass(frozen=True)
class Cycle:
    """One propose-verify-accept round of one row.

    Attributes:
        proposed, accepted: tokens.
        emitted: tokens committed, at most accepted + 1.
        cut: end-of-sequence dropped the rest of the block; left out of acceptance, kept in time.
    """

    proposed: int
    accepted: int
    emitted: int
    cut: bool


@dataclass
class Answer:
    """A request and what came of it.

    Attributes:
        request: what was asked.
        tokens: emitted ids, the end-of-sequence token included.
        cycles: every round; the first token, which the prefill gives, belongs to none.
        finish: "eos", "length", "stop", or "" while it runs.
        hidden: the target's final hidden state before each token [H], when asked for.
        simulated: accepted by given rates (`engine.simulate`): the tokens are not what the target says.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    finish: str = ""
    hidden: list[Tensor] = field(default_factory=list)
    simulated: bool = False

    def commit(self, tokens: Sequence[int], eos: Set[int], stop: Callable[[list[int]], bool] | None) -> bool:
        """Appends tokens up to an end-of-sequence or the length limit; tells whether any were dropped."""
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            if token in eos:
                self.finish = "eos"
            elif len(self.tokens) == self.request.max_new:
                self.finish = "length"
            if self.finish:
                return i + 1 < len(tokens)
        if stop is not None and stop(self.tokens):
            self.finish = "stop"
        return False


@dataclass(frozen=True)
class Verified:
    """One verify pass of B active rows, before its tokens are committed.

    The next pass may overwrite the tensors (captured steps do), so a reader copies what it keeps.

    Attributes:
        answers: the rows' requests; their tokens are those that the pass started from.
        proposed: [>= B, k] drafted ids; rows beyond B hold nothing.
        count: real proposals of each row.
        accepted: of these, from the first on.
        hidden: [>= B, k + 1, H] the target's final states after the newest token and after each proposal.
        logits: [>= B, k + 1, R] the target's head over them.
    """

    answers: tuple[Answer, ...]
    proposed: Tensor
    count: list[int]
    accepted: list[int]
    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Texts(Sequence[list[int]]):
    """Each row's tokens so far, put together when asked for; rows beyond the answers hold a text of two zeros."""

    answers: Sequence[Answer]
    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, row: Any) -> Any:
        if not 0 <= row < self.num:
            raise IndexError(row)
        if row >= len(self.answers):
            return [0, 0]
        return [*self.answers[row].request.ids, *self.answers[row].tokens]
