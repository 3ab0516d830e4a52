"""The KV slab of one model: plain tensors with a slot per (row, position); rollback is arithmetic on lengths."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig


class Slab:
    """Keys and values of every layer for up to `batch` rows of `capacity` positions.

    The slab does not know how long a row is: the caller says at which positions a step writes, and a key is visible
    to a query when its position is not larger than the query's. So dropping rejected tokens is only a smaller length,
    and what they left behind is overwritten before it can be seen.

    Attributes:
        key, value: per layer a tensor [B, K, S, D].
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
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"a KV slab needs at least one row and one slot, got batch {batch}, capacity {capacity}")
        self.batch, self.capacity = batch, capacity
        shape = (num_layers, 2, batch, num_kv_heads, capacity, head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.key = [layer[0] for layer in self._data]
        self.value = [layer[1] for layer in self._data]

    @classmethod
    def for_model(
        cls, config: PreTrainedConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Slab:
        """A slab with the shape that `config` asks for."""
        layers, heads, width = kv_shape(config)
        return cls(layers, batch, heads, capacity, width, dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes held: layers * 2 * rows * KV heads * slots * head width * bytes per element."""
        return self._data.numel() * self._data.element_size()

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` slots of one row over another (the last row takes a finished one's place)."""
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]


def kv_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head width) of a decoder's config."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, width


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one position of one row holds."""
    layers, heads, width = kv_shape(config)
    return 2 * layers * heads * width * torch.empty(0, dtype=dtype).element_size()
