"""Sizes from config.json alone equal those of the models that transformers builds from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from distill.counts import count, head_dim, kv_bytes, kv_heads
from distill.models import param_counts
from engine.cache import kv_bytes_per_token
from tests.distill.test_prune import CONFIGS

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def on_disk(config: PreTrainedConfig, folder: Path) -> dict[str, object]:
    config.save_pretrained(folder)
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("tied", [None, True, False])
@pytest.mark.parametrize("dim", [None, 16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_counts_of_a_config_are_those_of_the_model(
    kind: str, dim: int | None, tied: bool | None, tmp_path: Path
) -> None:
    more = {key: value for key, value in (("head_dim", dim), ("tie_word_embeddings", tied)) if value is not None}
    config = CONFIGS[kind](**SHAPE, **more)
    found = on_disk(config, tmp_path)
    for rows in (None, 10):
        size = param_counts(config, rows)
        assert count(found, rows) == (size.stored, size.read)
    assert kv_heads(found) == 3
    assert kv_bytes(found, 2) == 3 * 2 * 3 * head_dim(found) * 2


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
        MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
        Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, head_dim=8),
    ],
)
def test_biases_and_experts_are_counted(config: PreTrainedConfig, tmp_path: Path) -> None:
    size, found = param_counts(config), count(on_disk(config, tmp_path))
    assert found[0] == size.stored
    assert found[1] == pytest.approx(size.read, rel=0.01)  # the router is read whole


def test_kv_bytes_are_the_slabs(t_kv3: PreTrainedModel, tmp_path: Path) -> None:
    assert kv_bytes(on_disk(t_kv3.config, tmp_path), 4) == kv_bytes_per_token(t_kv3.config, torch.float32)
