"""One request to a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        id: unique among the prompts of one call.
        domain: code, math, qa or the user's own word.
        messages: chat messages (role, content), ending in the user's turn.
        reference: the data set's answer, where it has one.
        source: where the prompt comes from.
    """

    id: str
    domain: str
    messages: tuple[dict[str, str], ...]
    reference: str | None
    source: str
