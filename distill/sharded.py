"""A model whose weights, gradients and optimizer state lie in parts on several processes (FSDP2).

Each layer is gathered while it runs. The table of the head never runs as a module: the loss takes the rows of a step
from it (`take_rows`) and hands their gradient back once a step (`add_gradient`). All functions but `is_sharded` must be
called by all processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from transformers import PreTrainedModel

from distill import ranks


def is_sharded(table: Tensor) -> bool:
    """Has this process only a part of it?"""
    return isinstance(table, DTensor)


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    left: nn.Parameter | None = None,
    right: nn.Parameter | None = None,
) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Spreads a model over the processes, in place.

    Gradients are added up, not averaged: each process has divided its loss by the supervised tokens of all of them.

    Args:
        model: whole, the same in every process; its head may be nn.Identity.
        mesh: one dimension, all processes.
        left, right: factors that stand for its head.

    Returns:
        The factors, cut.
    """
    body, head, embedding = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    for part in [*body.layers, body]:
        # The body too: what stays whole after a forward that has no backward would not be the weight that is saved.
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    for part in body.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    if tied:
        head.weight = embedding.weight
    elif isinstance(head, nn.Linear):
        head.weight = _cut(head.weight, mesh)
    return None if left is None else _cut(left, mesh), None if right is None else _cut(right, mesh)


def _cut(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """By rows, for a parameter that is not used by running its module."""
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]), requires_grad=weight.requires_grad)


def whole(weight: Tensor) -> Tensor:
    """The whole of a small parameter, inside the graph; its gradient is added up over the processes."""
    return weight.full_tensor(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` [R] of a table [V, h], as a new tensor [R, h] outside any graph."""
    if not isinstance(table, DTensor):
        return table.detach()[ids]
    local, inside, at = _own(table.detach(), ids)
    found = local.new_zeros(len(ids), table.shape[1])
    found[inside] = local[at]
    return ranks.total(found)  # all but one process add zeros


def add_gradient(table: Tensor, ids: Tensor, gradient: Tensor) -> None:
    """Adds the gradient [R, h] of rows `ids` to that of the table; of a sharded one, that of all processes."""
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    if not isinstance(table, DTensor):
        table.grad.index_add_(0, ids, gradient)
        return
    ranks.total(gradient)
    local, inside, at = _own(table.grad, ids)
    local.index_add_(0, at, gradient[inside])


def _own(table: DTensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This process's rows of a table, which of `ids` are among them [R], and where those lie in it."""
    local = table.to_local()
    size = -(-table.shape[0] // table.device_mesh.size())  # as torch.chunk cuts: the last may be shorter or empty
    first = size * table.device_mesh.get_local_rank()
    assert len(local) == max(0, min(size, table.shape[0] - first)), (len(local), size, first)
    inside = (ids >= first) & (ids < first + len(local))
    return local, inside, ids[inside] - first
