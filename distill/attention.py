"""The attention of training: the engine's causal products where nothing is masked, transformers' own elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.dense import causal_attention

NAME = "specdraft_train"


def train_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: query [B, H, T, D], key and value [B, K, T, D] to [B, T, H, D].

    transformers gives no mask where plain causal attention is meant, and one where a window slides.
    """
    if attention_mask is not None or dropout > 0:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    # Under autocast the rotation leaves queries and keys in float32; the products are to be in the values' precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return causal_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None


def use(model: PreTrainedModel) -> None:
    """Gives a model the attention of training; Gemma-2's cap on logits has no fused kernel and keeps the plain one."""
    AttentionInterface.register(NAME, train_attention)  # again and again is harmless
    AttentionMaskInterface.register(NAME, sdpa_mask)
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("eager" if capped else NAME)
