"""One answer and the proposals that the target refused, side by side in one row of tokens.

A verify pass after the text x reads the proposals d_1 ... d_k and gives the target's distribution after x d_1 ... d_j
for every j in 0..k. With a of them accepted, j = 0..a lie on the answer's own text. What follows is a *branch*: it
leaves the text behind its first n tokens (x and the a accepted ones) and goes on with d_{a+1}, d_{a+2}, ... Every one
of these distributions is the target's own, given what was drafted before it, refused tokens included: the pass computed
nothing else. Two kinds are left out: those after a drafted end of text, which no server ever reads, and those of
proposals beyond the answer's room, which do not count in the cycle either.

A row of training holds the text once and its branches behind it, each token at its own place in its own text:

    token      p0  p1  t1  t2  t3 | d2  d3 | d3'
    position    0   1   2   3   4 |  3   4 |  4
    branch      0   0   0   0   0 |  1   1 |  2       0 is the text
    anchor      0   1   2   3   4 |  2   2 |  3       last position of the text that it sees

A token sees the text up to its anchor, and the tokens of its own branch up to itself. So a forward pass over the row
is one over each branched text, without reading the text again for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from engine.request import Verified

PAD = -1
BY_LAYER = ("qwen2", "qwen3", "gemma2", "gemma3_text")  # types that take one mask for each kind of layer


class Branch(NamedTuple):
    """Refused proposals that follow an answer's first tokens.

    Attributes:
        after: tokens of the answer before it, at least 1.
        ids: the proposals, from the refused one on.
        best: the target's likeliest next token after each.
    """

    after: int
    ids: list[int]
    best: list[int]


@dataclass(frozen=True)
class Layout:
    """Where each token of a batch stands, and what it sees.

    Attributes:
        position, branch, anchor: [B, T] each; see the module. Padding is of branch -1 and sees itself alone.
    """

    position: Tensor
    branch: Tensor
    anchor: Tensor

    @classmethod
    def side_by_side(cls, rows: Sequence[Tensor], width: int) -> Layout:
        """The layouts [3, T] of single rows (`lay_out`), padded to `width`."""
        padded = [torch.nn.functional.pad(row, (0, width - row.shape[1]), value=PAD) for row in rows]
        position, branch, anchor = torch.stack(padded).unbind(1)
        return cls(position.clamp(min=0), branch, anchor)

    def map(self, move: Callable[[Tensor], Tensor]) -> Layout:
        """The same on another device, or in other memory."""
        return Layout(move(self.position), move(self.branch), move(self.anchor))

    def sees(self, window: int | None = None) -> Tensor:
        """[B, 1, T, T] true where a query (row) sees a key (column).

        Args:
            window: a layer's sliding window, in positions; None is none.
        """
        key, query = self.position[:, None, :], self.position[:, :, None]
        text = (self.branch[:, None, :] == 0) & (key <= self.anchor[:, :, None])
        own = (self.branch[:, None, :] == self.branch[:, :, None]) & (key <= query)
        pad = (self.branch[:, :, None] == PAD) & ~torch.eye(key.shape[2], dtype=torch.bool, device=key.device)
        seen = (text | own) & ~pad
        return (seen if window is None else seen & (query - key < window))[:, None]

    def arguments(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Keywords for a decoder of transformers: positions and masks of every kind of its layers."""
        # The eager attention adds its mask; the others take it as it is.
        additive = config._attn_implementation == "eager"
        window = getattr(config, "sliding_window", None)

        def mask(width: int | None) -> Tensor:
            seen = self.sees(width)
            return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf")) if additive else seen

        given: Any = mask(window)
        if config.model_type in BY_LAYER:
            kinds = {"full_attention": None, "sliding_attention": window}
            given = {kind: mask(kinds[kind]) for kind in dict.fromkeys(config.layer_types)}
        return {"position_ids": self.position, "attention_mask": given}


def lay_out(num_text: int, num_prompt: int, branches: Sequence[Branch]) -> Tensor:
    """[3, T] position, branch and anchor of a row: its text's tokens, then its branches'.

    Args:
        num_text: tokens of prompt and answer that are read.
        num_prompt: of these, the prompt's.
        branches: in the order in which their tokens stand.
    """
    text = torch.arange(num_text)
    parts = [torch.stack([text, torch.zeros_like(text), text])]
    for number, branch in enumerate(branches, 1):
        anchor = num_prompt + branch.after - 1
        ahead = anchor + 1 + torch.arange(len(branch.ids))
        parts.append(torch.stack([ahead, torch.full_like(ahead, number), torch.full_like(ahead, anchor)]))
    return torch.cat(parts, 1)


def branch_length(proposed: Sequence[int], accepted: int, eos: frozenset[int]) -> int:
    """Proposals of a refused branch that the target's judgement is kept of: none after an end of text.

    Args:
        proposed: the cycle's real proposals.
        accepted: how many of them the target took.
        eos: ids that end a text.
    """
    ends = next((place for place, token in enumerate(proposed) if token in eos), len(proposed))
    return max(0, ends - accepted)


class Refused:
    """Gathers the branches of every request that a decoder runs; to be given to it as `watch`.

    Args:
        eos: ids that end a text.
    """

    def __init__(self, eos: Sequence[int]) -> None:
        self.eos = frozenset(eos)
        self._found: dict[str, list[tuple[Branch, Tensor]]] = {}

    def __call__(self, seen: Verified) -> None:
        """Takes what one pass refused; a pass that refused nothing leaves nothing."""
        proposed = seen.proposed.tolist()
        for row, answer in enumerate(seen.answers):
            kept, drafted = seen.accepted[row], proposed[row][: seen.count[row]]
            num = branch_length(drafted, kept, self.eos)
            if num == 0:
                continue
            at = slice(kept + 1, kept + 1 + num)
            best = seen.logits[row, at].argmax(-1).tolist()
            branch = Branch(len(answer.tokens) + kept, drafted[kept : kept + num], best)
            found = self._found.setdefault(answer.request.id, [])
            found.append((branch, seen.hidden[row, at].clone()))

    def take(self, request: str) -> list[tuple[Branch, Tensor]]:
        """The branches of one request with the target's states [n, H] behind each of their tokens; forgets them."""
        return self._found.pop(request, [])
