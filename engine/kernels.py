"""Attention of few queries over many keys on a GPU: the two kernels that divide the keys among multiprocessors.

One call of `scaled_dot_product_attention` with a mask gives each (row, KV head) to one block of threads, however many
keys there are: at batch 1 a target with 8 KV heads keeps 8 multiprocessors busy. So the keys are cut into parts:

    "sdpa"   one call, nothing is cut; the CPU's
    "split"  torch's fused kernel once over all parts, joined by their log-sum-exps (flash-decoding); CUDA's default
    "flex"   flex_attention's decoding kernel, which cuts by itself; compiled by Triton for each shape

Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import no_type_check

import torch
from torch import Tensor

KERNELS = ("sdpa", "split", "flex")
CHUNK = 256  # keys of the smallest part
BLOCKS = 264  # blocks of threads wanted: two for each of the 132 multiprocessors of a large GPU
LOWEST = -1e30  # a finite mask: a part without a visible key has a finite result too, of weight 0


def default_kernel(device: torch.device) -> str:
    """The kernel of a device when none is asked for."""
    return "split" if device.type == "cuda" else "sdpa"


def check_kernel(name: str, device: torch.device) -> str:
    """The name, if this device has the kernel.

    Raises:
        ValueError: an unknown name, or "flex" without CUDA.
    """
    if name not in KERNELS:
        raise ValueError(f"attention is {name!r}; it must be one of {', '.join(KERNELS)}")
    if name == "flex" and device.type != "cuda":
        raise ValueError(f"attention is 'flex' on {device.type}: its decoding kernel needs CUDA; use 'sdpa' or 'split'")
    return name


def chunk_of(rows: int, extent: int) -> int:
    """Keys of a part: as many as leave `BLOCKS` parts over all rows; the extent itself when rows alone are enough.

    Args:
        rows: batch * KV heads.
        extent: keys of a row; one that is no multiple of `CHUNK` stays whole.

    Returns:
        a divisor of the extent.
    """
    if extent % CHUNK or rows >= BLOCKS:
        return extent
    chunk = CHUNK
    while extent % (2 * chunk) == 0 and rows * extent // (2 * chunk) >= BLOCKS:
        chunk *= 2
    return chunk


def part_mask(mask: Tensor, heads: int, chunk: int) -> Tensor:
    """The additive mask [B, 1, T, S] of the parts: [B*K, S / chunk, T, chunk], finite."""
    lowest = max(LOWEST, torch.finfo(mask.dtype).min / 2)
    parts = mask[:, 0].clamp(min=lowest).unflatten(2, (-1, chunk)).transpose(1, 2)
    # One row is shared by its heads as a view; the rows of a batch can not be, for rows and heads are one axis.
    return parts.expand(heads, -1, -1, -1) if mask.shape[0] == 1 else parts.repeat_interleave(heads, 0)


def split_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention over parts of the keys, joined: sum_i softmax_i(lse)_i * out_i, which is the whole's softmax.

    Args:
        query: [B, K, T, D].
        keys, values: [B, K, S, D] views of the slab.
        mask: [B*K, S / chunk, T, chunk] from `part_mask`.
        scale: factor on the logits; None is D**-0.5.

    Returns:
        [B, K, T, D].
    """
    batch, heads, tokens, width = query.shape
    parts, chunk = mask.shape[1], mask.shape[3]
    asked = query.reshape(batch * heads, 1, tokens, width).expand(-1, parts, -1, -1)
    # Rows and heads lie behind one another in a slab, so both cuts are views.
    key_parts, value_parts = (x.flatten(0, 1).unflatten(1, (parts, chunk)) for x in (keys, values))
    out, lse = _with_lse(asked, key_parts, value_parts, mask, scale)
    weights = torch.softmax(lse, 1)[..., None]
    return (weights * out.float()).sum(1).to(query.dtype).view(batch, heads, tokens, width)


def _with_lse(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """torch's fused kernel that takes a mask and tells its log-sum-exp: out [N, P, T, D] and lse [N, P, T]."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, mask, True, 0.0, False, scale=scale
    )
    return out, lse[..., : query.shape[2]]  # it is padded to a multiple of 32 queries


def flex_decode(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float | None, sliding: int | None,
    ring: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """flex_attention over the slab; the mask is computed in the kernel from the tokens' positions.

    Args:
        query: [B, K, G*T, D], the groups outermost.
        keys, values: [B, K, S, D] views of the slab.
        positions: [B, T].
        scale: factor on the logits; None is D**-0.5.
        sliding: tokens a sliding layer looks back; None sees all.
        ring: (sinks, recent, slots taken in turns) of `engine.ring.Ring`; None: slots are positions.

    Returns:
        [B, K, G*T, D].
    """
    # One compilation a shape; past the limit torch raises (fullgraph), it does not go on uncompiled.
    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        return _compiled_flex()(query, keys, values, positions, scale, sliding, ring)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """The compiled function, made at its first use: importing the compiler takes seconds."""
    return torch.compile(_flex, dynamic=False, fullgraph=True)


@no_type_check  # a wrapper that checks types, as the tests put around every function, could not be compiled
def _flex(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float | None, sliding: int | None,
    ring: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.flex_attention import flex_attention

    tokens = positions.shape[1]

    def visible(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        position, there = positions[b, q % tokens], kv
        if ring is not None:  # `Ring.held`
            newest = positions[b, tokens - 1]
            there = torch.where((kv < ring[0]) | (kv > newest), kv, newest - (newest - kv) % ring[2])
        seen = there <= position
        if sliding is not None:
            seen = seen & (there > position - sliding)
        if ring is not None:
            seen = seen & ((there < ring[0]) | (there > position - ring[1]))
        return torch.where(seen, score, -float("inf"))

    return flex_attention(query, keys, values, score_mod=visible, scale=scale)
