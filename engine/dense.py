"""Attention over keys that lie beside the queries, no slab: a prefill's, training's, and the plain call of any step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.ring import Ring, sees

PRODUCTS_UP_TO = 512  # tokens; see `causal_attention`
BAND = 512  # queries of a prefill that look at one stretch of keys; see `banded_attention`
BLOCK = 256  # queries of a long prefill on a CPU; see `_blocks`


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """Every token sees itself and what came before it: a prefill, and training.

    Args:
        query: [B, H, T, D].
        key, value: [B, K, T, D].
        scaling: factor on the logits; None is D**-0.5.

    Returns:
        [B, H, T, D].
    """
    batch, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and 1 < tokens <= PRODUCTS_UP_TO:
        # Measured on two cores, forward and backward: 22 ms against the fused kernel's 96 at 28 rows of 150 tokens, 66
        # against 122 at 12 rows of 330, 149 against 143 at 6 rows of 680.
        folded = (query * (width**-0.5 if scaling is None else scaling)).reshape(-1, groups * tokens, width)
        scores = torch.bmm(folded, key.reshape(-1, tokens, width).transpose(1, 2)).view(-1, groups, tokens, tokens)
        weights = torch.softmax(scores + _later(tokens, query.dtype), -1).view(-1, groups * tokens, tokens)
        return torch.bmm(weights, value.reshape(-1, tokens, width)).view(batch, heads, tokens, width)
    trains = query.requires_grad or key.requires_grad or value.requires_grad
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and tokens > PRODUCTS_UP_TO and not trains:
        return _blocks(query * (width**-0.5 if scaling is None else scaling), key, value)
    # Bound by arithmetic, so repeating K and V is cheap and keeps the causal kernel.
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)


def _later(tokens: int, dtype: torch.dtype) -> Tensor:
    """[T, T] to add to scores: what comes later is not seen."""
    return torch.full((tokens, tokens), -torch.inf, dtype=dtype).triu_(1)


def _blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A long prefill on a CPU: one KV head and 256 tokens at a time over the keys up to them, by two plain products.

    Measured on two cores, a layer of SmolLM2, beside the fused kernel: 17 and 25 ms at 1,500 tokens, 82 and 131 at
    3,800, 414 and 571 at 8,160. Batched products over the heads copy their keys, which do not lie densely up to a
    block's end.

    Args:
        query: [B, H, T, D], already scaled.
        key, value: [B, K, T, D].

    Returns:
        [B, H, T, D].
    """
    tokens, width = query.shape[2:]
    groups = query.shape[1] // key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    later = _later(BLOCK, query.dtype)
    folded, folded_out = (x.reshape(-1, groups, tokens, width) for x in (query, out))
    for head, keys, values, told in zip(folded, key.flatten(0, 1), value.flatten(0, 1), folded_out, strict=True):
        keys, values = keys.contiguous(), values.contiguous()
        for first in range(0, tokens, BLOCK):
            last = min(first + BLOCK, tokens)
            own = last - first
            scores = (head[:, first:last].reshape(-1, width) @ keys[:last].t()).view(groups, own, last)
            scores[..., first:] += later[:own, :own]
            weights = torch.softmax(scores, -1, out=scores).view(-1, last)
            told[:, first:last] = (weights @ values[:last]).view(groups, own, width)
    return out


def banded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near: int,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding: int | None = None,
    ring: Ring | None = None,
) -> Tensor:
    """A prefill whose tokens do not see all before them: 512 queries at a time over the keys that one of them sees.

    Its cost grows with the length times the window, not with the square of the length.

    Args:
        query: [B, H, T, D].
        key, value: [B, K, T, D].
        near: tokens that a query sees at most, itself included, a ring's first ones left out.
        scaling, softcap, sliding: as for `engine.attention.slab_attention`.
        ring: what the row keeps; None is all.

    Returns:
        [B, H, T, D].
    """
    batch, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    place = torch.arange(tokens, device=query.device)
    out = []
    for first in range(0, tokens, BAND):
        last, low = min(first + BAND, tokens), max(0, first - near + 1)
        sunk = 0 if ring is None else min(ring.sinks, low)
        there = torch.cat([place[:sunk], place[low:last]])
        visible = sees(place[first:last, None], there, sliding, ring).repeat(groups, 1)
        mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -torch.inf)
        folded = query[:, :, first:last].reshape(batch, -1, groups * (last - first), width)
        seen = attend(folded, key[:, :, there], value[:, :, there], mask[None, None], scaling, softcap)
        out.append(seen.view(batch, heads, last - first, width))
    return torch.cat(out, 2)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Queries [B, K, T, D] over keys and values [B, K, S, D], with an additive mask [B, 1, T, S] or none."""
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    logits = (query @ keys.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    logits = torch.tanh(logits / softcap) * softcap
    logits = logits if mask is None else logits + mask.float()
    return torch.softmax(logits, dim=-1).to(query.dtype) @ values
