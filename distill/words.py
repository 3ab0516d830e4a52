"""A model's states at the supervised positions, and the rows of the embedding that a step reads as a leaf of its own.

Through the table itself autograd makes a gradient of all its rows for every micro-batch, nearly all of it zeros: 113 MB
at 49,152 rows of width 576, where a step reads some hundreds of rows. Their gradients are added to the table's once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from distill import sharded
from distill.teacher import Batch


@dataclass(frozen=True)
class Words:
    """Distinct token ids of a step, ascending [U], and their rows [U, h]."""

    ids: Tensor
    rows: Tensor

    @classmethod
    def read(cls, embedding: nn.Module, input_ids: Iterable[Tensor]) -> Words | None:
        """Those of some batches; None where the table is not trained, or lies in parts on several processes."""
        table = embedding.weight
        assert isinstance(table, Tensor)
        if not table.requires_grad or sharded.is_sharded(table):
            return None
        ids = torch.cat([ids.flatten() for ids in input_ids]).unique()
        return cls(ids, table.detach()[ids].requires_grad_())

    def embed(self, embedding: nn.Module, input_ids: Tensor) -> Tensor:
        """What the embedding gives for ids [B, T] of the step: [B, T, h], scaled where the module scales."""
        found: Tensor = functional_call(embedding, {"weight": self.rows}, (torch.searchsorted(self.ids, input_ids),))
        return found

    def give_back(self, embedding: nn.Module) -> None:
        """Adds the rows' gradient to the table's."""
        if self.rows.grad is not None:
            assert isinstance(embedding.weight, Tensor)
            sharded.add_gradient(embedding.weight, self.ids, self.rows.grad)


def states_of(model: PreTrainedModel, batch: Batch, words: Words | None = None) -> Tensor:
    """[N, h] final hidden states of a model at the supervised positions."""
    given = {} if batch.layout is None else batch.layout.arguments(model.config)
    if words is None:
        given["input_ids"] = batch.input_ids
    else:
        given["inputs_embeds"] = words.embed(model.get_input_embeddings(), batch.input_ids)
    states = model.get_decoder()(use_cache=False, **given).last_hidden_state
    return states[batch.positions[:, 0], batch.positions[:, 1]]
