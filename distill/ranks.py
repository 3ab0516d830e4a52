"""What the processes of one training run tell each other; all of it does nothing in a run of one process."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn


class FirstFailed(Exception):
    """The first process of the run failed, and says why; the others end with it."""


def place() -> int:
    """This process's index among those that have met, 0 where there is one."""
    return distributed.get_rank() if several() else 0


def several() -> bool:
    """Have several processes met?"""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def total(value: Tensor) -> Tensor:
    """Sum over the processes, in place."""
    if several():
        distributed.all_reduce(value)
    return value


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Adds up every gradient over the processes, once a step.

    A sum and not a mean: each process has divided its loss by the supervised tokens of all of them.
    """
    if several():
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for work in [distributed.all_reduce(grad, async_op=True) for grad in grads]:
            work.wait()


def gather(values: Tensor) -> list[Tensor]:
    """The [n] of every process, in order of rank; n may differ."""
    if not several():
        return [values]
    sizes = values.new_zeros(distributed.get_world_size(), dtype=torch.long)
    sizes[distributed.get_rank()] = len(values)
    lengths = total(sizes).tolist()
    padded = values.new_zeros(max(lengths))
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in lengths]
    distributed.all_gather(parts, padded)
    return [part[:length] for part, length in zip(parts, lengths)]


def largest(number: int, device: torch.device) -> int:
    """The largest number of any process."""
    if not several():
        return number
    value = torch.tensor(number, device=device)
    distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
    return int(value)


def part() -> None:
    """Ends the communication, in a process that is about to end; its run must have dropped its models.

    Gloo's threads still hold tensors for a moment after the last exchange; one that drops its tensor while the
    interpreter shuts down aborts a process that has done all its work.
    """
    if distributed.is_available() and distributed.is_initialized():
        gc.collect()  # what is held in a cycle (trainer and module) holds the group as well
        distributed.destroy_process_group()
