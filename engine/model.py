"""One model that runs step by step over its own KV slab."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention import NAME, Nodes, Window, register
from engine.cache import Slab, bucket, row_bucket
from engine.compiled import compile_steps
from engine.head import Head
from engine.kernels import check_kernel, default_kernel
from engine.pack import pack_linears
from engine.ring import SINKS, Ring


class Runner:
    """Steps of one decoder: token ids in, final hidden states or logits out.

    Args:
        model: a transformers causal LM in eval mode; its attention is switched to the engine's, its linear layers to
            packed ones where that pays.
        batch: rows held at once.
        capacity: positions a row can hold (prompt + answer + drafted tokens).
        shortlist: sorted token ids whose head rows are used; None uses every row of the head.
        vocab: rows of the head that are real; a head padded further (151,936 against 152,064 rows) is cut to it.
        attention: "sdpa", "split" or "flex" (see `engine.kernels`); None is "split" on CUDA and "sdpa" elsewhere.
        fixed: round slots, rows and draft lengths up to a few shapes, each of which can be captured as a graph; None
            does so on CUDA. Eager and captured runs there have the same shapes, so they give the same tokens.
        compile: run steps through `torch.compile` (see `engine.compiled`), which fixes their shapes.
        recent: a window, for a draft of long contexts: rows keep the first `sinks` tokens and so many of the newest,
            and the slab holds sinks + recent + 64 slots a row. None keeps all.
        sinks: see `recent`.
        factors: (A [V, r], B [r, H]) read in place of the head, whose product they are.

    Raises:
        ValueError: a head that can not be read so (see `engine.head`); the device lacks the attention;
            a window out of range; `compile` without fixed shapes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int = 1,
        capacity: int = 1024,
        shortlist: Tensor | None = None,
        vocab: int | None = None,
        attention: str | None = None,
        fixed: bool | None = None,
        compile: bool = False,
        recent: int | None = None,
        sinks: int = SINKS,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if compile and fixed is False:
            raise ValueError("compile is True and fixed is False: a compiled step has a fixed shape; leave fixed out")
        ring = None if recent is None else Ring.for_capacity(sinks, recent, capacity)
        register()
        model.set_attn_implementation(NAME)
        self.config = model.config
        self.device, self.dtype = model.device, model.dtype
        self._body = model.get_decoder()
        self._head = Head(model, shortlist, vocab, factors)
        self.shortlist = self._head.shortlist
        pack_linears(self._body)
        self.attention = check_kernel(attention or default_kernel(self.device), self.device)
        self.fixed = compile or self.device.type == "cuda" if fixed is None else fixed
        self._capacity = capacity
        slots = capacity if ring is None else ring.slots
        slots = bucket(slots) if self.fixed else slots
        ring = None if ring is None else replace(ring, slots=slots)
        self.slab = Slab.for_model(self.config, batch, slots, self.dtype, self.device, ring)
        self._compile = compile
        if compile:
            self.slab.ensure(slots)  # strides are part of a compiled shape
        self._one_step = compile_steps(self._body) if compile else self._body

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads; the embedding is a look-up."""
        embedding = self._body.get_input_embeddings().weight
        body = sum(w.numel() for w in self._body.parameters() if w is not embedding)
        return (body + self._head.numel) * self.dtype.itemsize

    def first_layers(self, num: int) -> Runner:
        """The same weights and the same slab, but only the first layers before the final norm and the head.

        Raises:
            ValueError: not 1 to one less than all layers, or a decoder that keeps its layers elsewhere.
        """
        layers = getattr(self._body, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not 1 <= num < len(layers):
            have = "unknown" if layers is None else len(layers)
            raise ValueError(f"{num} first layers asked for; this decoder has {have}; ask for 1 or more, not all")
        body = copy.copy(self._body)
        body._modules = {**self._body._modules, "layers": layers[:num]}
        early = copy.copy(self)
        early._body = body
        early._one_step = compile_steps(body) if self._compile else body
        return early

    @property
    def max_positions(self) -> int:
        """Positions that a row may reach: those of the model, and the capacity asked for."""
        return min(self._capacity, getattr(self.config, "max_position_embeddings", self._capacity))

    def extent(self, need: int, most: int) -> int:
        """Slots that a step looks at.

        Args:
            need: slots that hold what the step reads, its own tokens included.
            most: the largest `need` among the steps of the same cycle.

        Returns:
            `need` (a window's slots at most), or with fixed shapes the bucket of `most`, the same for all steps of a
            cycle.
        """
        if self.fixed:
            return min(bucket(most), self.slab.capacity)
        return need if self.slab.ring is None else min(need, self.slab.capacity)

    def forget(self, positions: int) -> None:
        """No row is in use any more, and the next ones start with so many positions; fixed shapes stay as they are."""
        if not self.fixed:
            self.slab.forget(positions)

    def rows(self, num: int) -> int:
        """Rows that a step runs for `num` requests; those beyond hold nothing."""
        return row_bucket(num, self.slab.batch) if self.fixed else num

    def prefill(self, ids: Tensor, row: int = 0) -> Tensor:
        """Reads a whole prompt into one row.

        Args:
            ids: [T] token ids.
            row: slab row.

        Returns:
            [T, H] final hidden states.
        """
        positions = torch.arange(ids.shape[0], device=self.device)[None]
        return self._run(ids[None], Window(self.slab, positions, ids.shape[0], first_row=row, fresh=True))[0]

    def step(self, ids: Tensor, start: Tensor, extent: int) -> Tensor:
        """Runs T tokens of each of the first B rows.

        Args:
            ids: [B, T] token ids.
            start: [B] position of the first of them.
            extent: slots to look at, over the largest position of the step.

        Returns:
            [B, T, H] final hidden states.
        """
        positions = start[:, None] + torch.arange(ids.shape[1], device=self.device)
        window = Window(self.slab, positions, extent, kernel=self.attention, static=self.fixed)
        return self._run(ids, window, self._one_step)

    def step_nodes(self, ids: Tensor, nodes: Nodes, extent: int) -> Tensor:
        """Runs nodes of a tree for each of the first B rows; each sees the prefix and its ancestors.

        Args:
            ids: [B, T] token ids of the nodes.
            nodes: which nodes these are.
            extent: slots to look at, over the largest slot of the step.

        Returns:
            [B, T, H] final hidden states.
        """
        return self._run(ids, Window(self.slab, nodes.positions, extent, nodes=nodes))

    def logits(self, hidden: Tensor) -> Tensor:
        """Head over hidden states [..., H] -> [..., R]: the whole vocabulary, or the shortlist's columns."""
        return self._head(hidden)

    def token(self, column: Tensor) -> Tensor:
        """Token ids of head columns."""
        return column if self.shortlist is None else self.shortlist[column]

    @torch.inference_mode()
    def _run(self, ids: Tensor, window: Window, body: Callable[..., Any] | None = None) -> Tensor:
        run = self._body if body is None else body
        out = run(input_ids=ids, position_ids=window.positions, use_cache=False, window=window)
        return out.last_hidden_state
