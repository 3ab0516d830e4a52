"""The attention function that we register with transformers: it writes K/V into the slab and attends over it.

transformers supplies every architecture and calls this function once a layer (`AttentionInterface`). The step's
`Window` travels there as a keyword argument, so nothing is global and one model can serve several slabs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.cache import Slab
from engine.dense import attend, banded_attention, causal_attention
from engine.kernels import chunk_of, flex_decode, part_mask, split_attention
from engine.ring import sees

NAME = "specdraft"


@dataclass(frozen=True)
class Nodes:
    """Nodes of a tree as one step's tokens. The whole tree lies in consecutive slots, whatever the depth of a node.

    In a ring the slots here are places in the text, which the ring then turns into its own.

    Attributes:
        root: [B] slot and position of the tree's root (the newest token).
        depth: [N] of each node: its position is root + depth, its slot root + its number.
        ancestors: [N, N] bool, both ends of a path included.
        first, last: the step's tokens are the nodes first ... last - 1; those before may stand in the slab already.
    """

    root: Tensor
    depth: Tensor
    ancestors: Tensor
    first: int
    last: int

    @property
    def positions(self) -> Tensor:
        """[B, T] of the step's tokens."""
        return self.root[:, None] + self.depth[self.first : self.last]

    @property
    def slots(self) -> Tensor:
        """[B, T] of the step's tokens."""
        return self.root[:, None] + torch.arange(self.first, self.last, device=self.root.device)


@dataclass
class Window:
    """What one step sees: where its tokens stand and how far back they look.

    Attributes:
        slab: the model's keys and values.
        positions: [B, T] position of each token; its key goes to that slot, unless it is a node of a tree or the slab
            is a ring.
        extent: slots [0, extent) are looked at (at least 1 + the largest slot; a ring has no more than its own).
        first_row: the step's rows are slab rows first_row ... first_row + B - 1.
        fresh: every row starts at position 0 and sees only this step's own tokens (a prefill).
        nodes: for a tree: which of its nodes the tokens are, and their slots. None is a chain.
        kernel: how the keys are read; see `engine.kernels`.
        static: decide nothing by the positions' values, so that the step can be captured; always so on a GPU.
    """

    slab: Slab
    positions: Tensor
    extent: int
    first_row: int = 0
    fresh: bool = False
    nodes: Nodes | None = None
    kernel: str = "sdpa"
    static: bool = False
    _masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)
    _parts: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch, tokens = self.positions.shape
        self.ring = self.slab.ring
        # Where a token stands in the text: the nodes of a tree one behind another.
        self.places = self.positions if self.nodes is None else self.nodes.slots
        self.slots, self.kept = self.places, None
        if self.ring is not None:
            # A step may not overwrite what its own first token sees; a prefill looks at its own keys and keeps the end.
            assert self.fresh or tokens <= self.ring.longest_step, (tokens, self.ring)
            if self.fresh and tokens > self.ring.slots:
                self.kept = self.ring.kept(tokens, self.positions.device)
                self.slots = self.slots[:, self.kept]
            self.extent = min(self.extent, self.ring.slots)
            self.slots = self.ring.slot(self.slots)
        assert self.extent <= self.slab.capacity, (self.extent, self.slab.capacity)
        assert self.first_row + batch <= self.slab.batch
        self.slab.ensure(self.extent)
        by_value = self.positions.device.type == "cpu" and not self.static
        # One row writes a contiguous block (a cheap copy); ragged rows, and one that goes round, scatter by an index.
        self.block = int(self.slots[0, 0]) if batch == 1 and by_value else None
        if self.block is not None and self.ring is not None and int(self.slots[0, -1]) != self.block + tokens - 1:
            self.block = None
        self.rows = torch.arange(self.first_row, self.first_row + batch, device=self.positions.device)[:, None]
        # Measured on two cores: from here on two batched products beat the fused kernel. They read whole rows, so not
        # where a longer text left rows far too wide (16 rows of 512 in 8,400 slots: 213 ms against 64, 55 in 512).
        narrow = self.slab.slots <= 2 * self.extent
        self.many_keys = by_value and batch * tokens <= 256 and batch * self.extent >= 1024 and narrow
        if self.many_keys and not self.fresh:
            self.extent = self.slab.slots
        # A single query of a single row sees all that is there: no mask at all. In a tree other branches are there.
        alone = batch == 1 and tokens == 1 and self.nodes is None
        self.sees_all = alone and self.block is not None and self.extent == self.block + 1
        if self.ring is not None and self.sees_all:
            self.sees_all = int(self.places[0, 0]) < self.ring.recent

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts this step's keys and values [B, K, T, D] into their slots."""
        if self.kept is not None:
            key, value = key[:, :, self.kept], value[:, :, self.kept]
        if self.block is not None:
            span = slice(self.block, self.block + key.shape[2])
            self.slab.key[layer][self.first_row, :, span] = key[0]
            self.slab.value[layer][self.first_row, :, span] = value[0]
        else:
            self.slab.key[layer][self.rows, :, self.slots] = key.transpose(1, 2)
            self.slab.value[layer][self.rows, :, self.slots] = value.transpose(1, 2)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, extent, D] of this step's rows, as views."""
        rows = slice(self.first_row, self.first_row + self.positions.shape[0])
        return self.slab.key[layer][rows, :, : self.extent], self.slab.value[layer][rows, :, : self.extent]

    def mask(self, sliding: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, 1, groups*T, extent], built once a step for each kind of layer."""
        if self.sees_all and (sliding is None or self.extent <= sliding):
            return None
        if (sliding, groups) not in self._masks:
            there = torch.arange(self.extent, device=self.positions.device)[None]
            if self.ring is not None:
                there = self.ring.held(self.places[:, -1], there[0])
            own = None
            if self.nodes is not None:
                own, there = _tree_visible(self.nodes, there)
            visible = sees(self.positions[:, :, None], there[:, None], sliding, self.ring)
            visible = visible if own is None else visible & own
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._masks[sliding, groups] = bias.repeat(1, groups, 1)[:, None]
        return self._masks[sliding, groups]

    def parts(self, sliding: int | None, groups: int, heads: int, mask: Tensor) -> Tensor:
        """The mask cut for `split_attention`, built once a step for each kind of layer."""
        if (sliding, groups) not in self._parts:
            chunk = chunk_of(self.positions.shape[0] * heads, self.extent)
            self._parts[sliding, groups] = part_mask(mask, heads, chunk)
        return self._parts[sliding, groups]


def _tree_visible(nodes: Nodes, places: Tensor) -> tuple[Tensor, Tensor]:
    """What a tree's nodes see of the keys at these places [B or 1, S]: [B, T, S]; and the keys' positions [B, S].

    Before the root places are positions, and all is visible; in the tree only ancestors; behind it nothing.

    Example: root 5 with children in slots 6 and 7, a child of the latter in slot 8. Positions of slots 5..8 are
    5, 6, 6, 7, and the node in slot 8 sees 0..5, 7 and 8.
    """
    root = nodes.root[:, None]
    node = places - root  # [B, S]
    inside = (node >= 0) & (node < nodes.depth.shape[0])
    node = node.clamp(0, nodes.depth.shape[0] - 1)
    allowed = nodes.ancestors[nodes.first : nodes.last][:, node].transpose(0, 1)
    there = torch.where(inside, root + nodes.depth[node], places)
    return torch.where(inside[:, None], allowed, (places < root)[:, None]), there


def slab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    window: Window,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of T new tokens over the slab.

    Grouped queries are folded into the token axis, [B, H, T, D] -> [B, K, G*T, D]: `enable_gqa` would copy the keys
    and values G times on a CPU.

    Args:
        module: the attention layer (gives `layer_idx`).
        query: [B, H, T, D], positions already applied.
        key, value: [B, K, T, D] of the new tokens.
        attention_mask: always None: the window makes its own.
        scaling: factor on the logits; None is D**-0.5.
        dropout: must be 0; the engine does not train.
        sliding_window: tokens a sliding layer looks back; None sees all.
        softcap: Gemma-2's cap on attention logits; None is no cap.
        window: this step's slab and positions.

    Returns:
        [B, T, H, D] and None (no attention weights).
    """
    assert attention_mask is None and dropout == 0.0
    batch, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    window.write(module.layer_idx, key, value)
    if window.fresh:
        near = min(tokens, sliding_window or tokens, tokens if window.ring is None else window.ring.recent)
        if near == tokens and softcap is None:
            return causal_attention(query, key, value, scaling).transpose(1, 2), None
        out = banded_attention(query, key, value, near, scaling, softcap, sliding_window, window.ring)
        return out.transpose(1, 2), None
    keys, values = window.read(module.layer_idx)
    folded = query.reshape(batch, key.shape[1], groups * tokens, width)
    if window.kernel == "flex" and softcap is None:
        assert window.nodes is None, "flex reads chains only"
        ring = None if window.ring is None else (window.ring.sinks, window.ring.recent, window.ring.turn)
        out = flex_decode(folded, keys, values, window.positions, scaling, sliding_window, ring)
        return out.reshape(batch, heads, tokens, width).transpose(1, 2), None
    mask = window.mask(sliding_window, groups, query.dtype)
    if softcap is None and window.many_keys:
        out = _products(folded * (width**-0.5 if scaling is None else scaling), keys, values, mask)
    elif softcap is None and window.kernel == "split" and mask is not None:
        out = split_attention(folded, keys, values, window.parts(sliding_window, groups, keys.shape[1], mask), scaling)
    else:
        out = attend(folded, keys, values, mask, scaling, softcap)
    return out.reshape(batch, heads, tokens, width).transpose(1, 2), None


def _products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Few queries over many keys on a CPU: two batched products, which read the slab in place.

    Measured on two cores, all 30 layers of SmolLM2: 34 ms against 69 of the fused kernel at 64 rows of 320 slots, 15
    against 35 at one row of 8,192. Keys first (K @ Q^T) took 41 and 22, and more conversions.

    Args:
        query: [B, K, T, D], already scaled.
        keys, values: [B, K, S, D] views of the slab.
        mask: [B, 1, T, S] additive, or None.

    Returns:
        [B, K, T, D].
    """
    scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).view(*query.shape[:3], -1)
    weights = torch.softmax(scores if mask is None else scores.add_(mask), -1)
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(query.shape)


def register() -> None:
    """Makes `attn_implementation="specdraft"` known to transformers (again and again is harmless).

    No mask function is registered: transformers then builds no mask. With one it would look in every step whether the
    positions hold several packed texts, which on a GPU waits for the device.
    """
    AttentionInterface.register(NAME, slab_attention)
