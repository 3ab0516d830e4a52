"""CUDA Graphs: a cycle's three device functions (draft, verify, accept), captured once a shape and replayed.

At batch 1 a step of a small model is some hundred kernels of a few microseconds each, and launching them one by one
takes longer than running them. A graph launches them all at once. What is captured must not wait for the device, must
have fixed shapes, and meets its inputs at fixed addresses; `Step` sees to the addresses and the engine to the rest:
lengths are rounded up to buckets, masks and noise are computed on the device from lengths and keys.

Noise needs no state outside: a uniform is a function of (seed, request key, position, purpose) in integer arithmetic
(`engine.noise`), so a replay draws what an eager run draws.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

WARM_UPS = 3  # runs before a capture, on a side stream, as torch's notes on CUDA Graphs ask
HOST_ROPE = ("dynamic", "longrope")  # rotary embeddings that look at positions from the host

Inputs = tuple[Tensor | None, ...]
Outputs = tuple[Tensor | None, ...]


def check_graph(graph: bool, device: torch.device, *configs: PreTrainedConfig) -> bool:
    """The wish for graphs, if it can be had.

    Args:
        graph: is capture asked for?
        device: where the models run.
        configs: of the models whose steps are to be captured.

    Raises:
        ValueError: capture is asked for on another device than CUDA, or of a model that decides on the host.
    """
    if not graph:
        return False
    if device.type != "cuda":
        raise ValueError(f"graph is true on {device.type}: CUDA Graphs need a CUDA device; use graph=False")
    for config in configs:
        if found := rope_types(getattr(config, "rope_parameters", None)) & set(HOST_ROPE):
            raise ValueError(
                f"graph is true but {config.model_type} has {found.pop()} rotary embeddings, which choose their "
                "frequencies on the host and can not be captured; use graph=False"
            )
    return True


def rope_types(parameters: Any) -> set[str]:
    """The kinds of rotary embedding in a config's `rope_parameters`, one a kind of layer or one for all."""
    if not isinstance(parameters, Mapping):
        return set()
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*(rope_types(value) for value in parameters.values()))


@dataclass(frozen=True)
class _Captured:
    """One graph with the tensors that it reads and writes; holding them keeps their memory from being given away."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    outputs: Outputs


class Step:
    """A function of the device: called as it is, or captured once for each key and replayed from then on.

    The function gets the static arguments, then the tensors; it must not wait for the device, and running it again on
    the same inputs must leave the KV slab as it is. It may change its inputs in place.

    Captured, its outputs are the same tensors at every replay: the next one overwrites them.

    Args:
        function: what to run: static arguments, tensors -> tensors.
        graph: capture (on a CUDA device); else every call runs the function.
        own: the graph reads copies of its own of the inputs, which every call fills. For callers that hand in tensors
            of several owners. Else it reads the tensors of the first call in place: those of the next calls are copied
            there only if they lie elsewhere, so state that a step changes in place must always be the same tensor.
        pool: memory that several steps share, which never run at the same time; None is a pool of its own.
    """

    def __init__(
        self, function: Callable[..., Outputs], graph: bool = False, own: bool = False, pool: Any = None
    ) -> None:
        self.function, self.graph, self._own = function, graph, own
        self._pool = memory_pool() if graph and pool is None else pool
        self._captured: dict[Hashable, _Captured] = {}

    @property
    def num_captured(self) -> int:
        """Graphs so far."""
        return len(self._captured)

    @torch.inference_mode()
    def __call__(self, static: tuple[Hashable, ...], *inputs: Tensor | None) -> Outputs:
        """Runs the function, or replays its graph.

        Args:
            static: what the function needs to know on the host; with the inputs' shapes it is the graph's key.
            inputs: tensors on the device; None where there is none.

        Returns:
            the function's outputs.
        """
        if not self.graph:
            return self.function(*static, *inputs)
        key = static, tuple(None if x is None else (x.shape, x.dtype) for x in inputs)
        if key not in self._captured:
            self._captured[key] = self._capture(static, inputs)
        found = self._captured[key]
        for there, new in zip(found.inputs, inputs, strict=True):
            if there is not None and new is not None and there.data_ptr() != new.data_ptr():
                there.copy_(new)
        found.graph.replay()
        return found.outputs

    def _capture(self, static: tuple[Hashable, ...], given: Inputs) -> _Captured:
        """Warms the function up and captures it; the inputs are afterwards what they were before."""
        before = tuple(None if x is None else x.clone() for x in given)
        inputs = tuple(None if x is None else x.clone() for x in given) if self._own else given
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.function(*static, *inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self.function(*static, *inputs)
        for there, old in zip(inputs, before, strict=True):
            if there is not None and old is not None:
                there.copy_(old)
        return _Captured(graph, inputs, outputs)


def memory_pool() -> Any:
    """A memory pool that steps can share."""
    return torch.cuda.graph_pool_handle()


class HostCopy:
    """Brings a small result to the host: one asynchronous copy into pinned memory, then one wait."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, result: Tensor) -> list[list[int]]:
        """The values of an int64 tensor [B, N]."""
        if result.device.type != "cuda":
            return result.tolist()
        shape = tuple(result.shape)
        if shape not in self._pinned:
            self._pinned[shape] = torch.empty(shape, dtype=result.dtype, pin_memory=True)
        self._pinned[shape].copy_(result, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._pinned[shape].tolist()
