"""The KV slab of one model: plain tensors with a slot per (row, position); rollback is arithmetic on lengths."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from engine.ring import Ring

STEP = 64  # slots are added by this many, or an eighth of what there is
BUCKET = 256  # smallest step of `bucket`


def bucket(slots: int) -> int:
    """Rounds slots up to one of few sizes: multiples of 256, past 4,096 of an eighth of the power of two below.

    A captured graph serves every length of its bucket, and at most an eighth of what it reads (past 2,048) is waste.
    """
    step = max(BUCKET, 1 << max(0, (slots - 1).bit_length() - 4))
    return -(-slots // step) * step


def row_bucket(rows: int, most: int) -> int:
    """Rounds rows up to a power of two, at most `most`."""
    return min(1 << (rows - 1).bit_length(), most)


class Slab:
    """Keys and values of every layer for up to `batch` rows of `capacity` positions.

    The slab does not know how long a row is: the caller says at which positions a step writes, and a key is visible
    to a query when its position is not larger than the query's. So dropping rejected tokens is only a smaller length,
    and what they left behind is overwritten before it can be seen.

    On a CPU only `slots` of the capacity are laid out, and more are when a step needs them: then all rows of a layer
    lie close together, and a batched product can read them as they are. Cut out of a wider slab they would be copied
    first, in every step (57 of 180 ms at 64 rows of 400 slots). On a GPU addresses must not move: slots = capacity.

    Attributes:
        key, value: per layer a tensor [B, K, slots, D].
        slots: positions laid out now.
        ring: rows keep their first and their most recent tokens, and slots are used again; None: slots are positions.

    Raises:
        ValueError: no row or no slot.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ring: Ring | None = None,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"a KV slab needs at least one row and one slot, got batch {batch}, capacity {capacity}")
        assert ring is None or ring.slots == capacity, (ring, capacity)
        self.batch, self.capacity, self.ring = batch, capacity, ring
        self._layers, self._width, self._kv_heads = num_layers, head_dim, num_kv_heads
        self._flat = torch.zeros(
            num_layers * 2 * batch * num_kv_heads * capacity * head_dim, dtype=dtype, device=device
        )
        self._lay_out(min(STEP, capacity) if self._flat.device.type == "cpu" else capacity)

    def _lay_out(self, slots: int) -> None:
        shape = (self._layers, 2, self.batch, self._kv_heads, slots, self._width)
        self._data = self._flat[: math.prod(shape)].view(shape)
        self.slots = slots
        self.key = [layer[0] for layer in self._data]
        self.value = [layer[1] for layer in self._data]

    def ensure(self, extent: int) -> None:
        """Lays out at least `extent` slots; what the rows hold stays."""
        if extent <= self.slots:
            return
        step = max(STEP, self.slots // 8 // STEP * STEP)
        old, kept = self._data, self.slots
        self._lay_out(min(self.capacity, -(-extent // step) * step))
        # From the last layer on: a layer's new place starts at or behind its old one, so it covers no old one before.
        for layer in reversed(range(self._layers)):
            rows = old[layer].clone()
            self._data[layer, ..., :kept, :] = rows
            self._data[layer, ..., kept:, :] = 0

    def forget(self, positions: int) -> None:
        """No row holds anything any more: on a CPU no more slots stay laid out than rows of so many positions need."""
        if self._flat.device.type == "cpu":
            self._lay_out(min(self.capacity, -(-max(positions, 1) // STEP) * STEP))

    @classmethod
    def for_model(
        cls,
        config: PreTrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ring: Ring | None = None,
    ) -> Slab:
        """A slab with the shape that `config` asks for."""
        layers, heads, width = kv_shape(config)
        return cls(layers, batch, heads, capacity, width, dtype, device, ring)

    @property
    def nbytes(self) -> int:
        """Bytes held: layers * 2 * rows * KV heads * slots * head width * bytes per element."""
        return self._flat.numel() * self._flat.element_size()

    def row_nbytes(self, length: int) -> int:
        """Bytes of what `take_row` copies."""
        used = min(length, self.capacity)
        return self._layers * 2 * self._kv_heads * used * self._width * self._flat.element_size()

    def take_row(self, row: int, length: int) -> Tensor:
        """A copy, in host memory, of the slots [layers, 2, K, slots, D] that a row of `length` positions fills."""
        return self._data[:, :, row, :, : min(length, self.capacity)].to("cpu", copy=True)

    def put_row(self, row: int, taken: Tensor) -> None:
        """Writes what `take_row` copied over a row: as if its tokens were read there."""
        self.ensure(taken.shape[3])
        self._data[:, :, row, :, : taken.shape[3]] = taken.to(self._data.device)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` slots of one row over another (the last row takes a finished one's place).

        In a ring a row of more positions than slots is copied whole.
        """
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def gather_path(self, root: Tensor, path: Tensor, count: Tensor) -> None:
        """Moves the keys of a tree's accepted path behind its root, so that slots are positions again.

        Args:
            root: [B] slot of each row's root; node n stands in slot root + n (in a ring: in the slot of that position).
            path: [B, m] nodes of the path from the root's child on, rising.
            count: [B] how many of a row's path are moved; the others stay where they are.
        """
        place = torch.arange(1, path.shape[1] + 1, device=path.device)
        rows, steps = ((place <= count[:, None]) & (path != place)).nonzero(as_tuple=True)
        if rows.numel():
            source, target = root[rows] + path[rows, steps], root[rows] + place[steps]
            if self.ring is not None:
                source, target = self.ring.slot(source), self.ring.slot(target)
            # The right side is a copy, so that a slot which is both read and written does no harm.
            self._data[:, :, rows, :, target] = self._data[:, :, rows, :, source]


def kv_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head width) of a decoder's config."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, width


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one position of one row holds."""
    layers, heads, width = kv_shape(config)
    return 2 * layers * heads * width * torch.empty(0, dtype=dtype).element_size()
