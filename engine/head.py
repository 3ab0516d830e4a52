"""A model's output head as one step reads it: all rows, the rows of a shortlist, or two low-rank factors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engine.pack import pack, packed_linear, pays


class Head:
    """Final hidden states in, logits out.

    Args:
        model: whose output embeddings are the head.
        shortlist: sorted token ids whose rows are used; None uses every row.
        vocab: rows that are real; a head padded further is cut to it.
        factors: (A [V, r], B [r, H]) whose product is the head: r * (V + H) weights are read in place of V * H.

    Attributes:
        shortlist: token ids of the logits' columns, on the model's device; None: column = id.
        numel: weights that a step reads.

    Raises:
        ValueError: the shortlist is not sorted, repeats an id or leaves the head; factors of another, or beside one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shortlist: Tensor | None = None,
        vocab: int | None = None,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        head = model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        self.shortlist = None
        inner = None
        if factors is not None:
            left, right = factors
            if (
                shortlist is not None
                or (left.shape[0], right.shape[1]) != weight.shape
                or left.shape[1:] != right.shape[:1]
            ):
                raise ValueError(
                    f"factors {tuple(left.shape)} and {tuple(right.shape)} do not make the head {tuple(weight.shape)}, "
                    "or a shortlist is given beside them; give one of the two"
                )
            weight, inner = left.to(weight), right.to(weight)
        rows = weight.shape[0]
        if shortlist is not None:
            if shortlist.numel() == 0 or not bool((shortlist[1:] > shortlist[:-1]).all()):
                raise ValueError("a shortlist must hold at least one token id, sorted, each once")
            if int(shortlist[0]) < 0 or int(shortlist[-1]) >= rows:
                raise ValueError(f"the shortlist holds id {int(shortlist[-1])}; the head has rows 0..{rows - 1}")
            self.shortlist = shortlist.to(weight.device)
            weight = weight[self.shortlist].contiguous()
            bias = None if bias is None else bias[self.shortlist]
        elif vocab is not None and vocab < rows:
            weight, bias = weight[:vocab], None if bias is None else bias[:vocab]
        self._bias = bias
        # From the hidden state on: B then A, or the rows alone.
        self._weights = [w for w in (inner, weight) if w is not None]
        self._packed = [pack(w) if pays(w) else None for w in self._weights]
        self._softcap = getattr(model.config, "final_logit_softcapping", None)
        self.numel = sum(w.numel() for w in self._weights)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., R]."""
        out = hidden
        for weight, packed in zip(self._weights, self._packed, strict=True):
            bias = self._bias if weight is self._weights[-1] else None
            out = linear(out, weight, bias) if packed is None else packed_linear(out, packed, bias)
        return out if self._softcap is None else torch.tanh(out / self._softcap) * self._softcap
