"""Parameters from the content of a config.json alone; torch is not loaded. `models.param_counts` counts real models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
# What transformers takes where config.json is silent.
HEAD_DIM = {"qwen3": 128, "qwen3_moe": 128, "gemma2": 256, "gemma3_text": 256}
TIED = ("gemma2", "gemma3_text")


def head_dim(config: Config) -> int:
    """Width of an attention head."""
    default = HEAD_DIM.get(config["model_type"]) or config["hidden_size"] // config["num_attention_heads"]
    return int(config.get("head_dim") or default)


def kv_heads(config: Config) -> int:
    """Key-value heads."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def tied(config: Config) -> bool:
    """Are embedding and head one matrix?"""
    value = config.get("tie_word_embeddings")
    return config["model_type"] in TIED if value is None else bool(value)


def count(config: Config, head_rows: int | None = None, rank: int | None = None) -> tuple[int, int]:
    """(stored, read per token) of a supported type; see `models.SizeCount`.

    Args:
        config: content of config.json.
        head_rows: rows of the head in use; None is all.
        rank: of a low-rank head; what is stored then is the dense head of its own that is exported.
    """
    if rank is not None:
        body = count(config, 0)[1]
        return count({**config, "tie_word_embeddings": False})[0], body + rank * (
            config["vocab_size"] + config["hidden_size"]
        )
    kind, width = config["model_type"], config["hidden_size"]
    queries, keys = config["num_attention_heads"] * head_dim(config), kv_heads(config) * head_dim(config)
    attention = 2 * width * queries + 2 * width * keys
    if kind == "qwen2":
        attention += queries + 2 * keys
    elif config.get("attention_bias"):
        attention += queries + 2 * keys + width
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        attention += 2 * head_dim(config)
    norms = (4 if kind.startswith("gemma") else 2) * width
    bias = 2 * config["intermediate_size"] + width if config.get("mlp_bias") else 0
    ffn = read_ffn = 3 * width * config["intermediate_size"] + bias
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        visited = config.get("num_experts_per_tok") or 1
        one = 3 * width * config.get("moe_intermediate_size", config["intermediate_size"])
        ffn, read_ffn = experts * (one + width), visited * one + experts * width
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    body = layers * (attention + norms + ffn) + width
    read = layers * (attention + norms + read_ffn) + width
    heads = vocab * width * (1 if tied(config) else 2)
    return body + heads, read + (vocab if head_rows is None else head_rows) * width


def layer_matrices(config: Config) -> int:
    """Elements of one layer's matrices (dense types), biases and norms left out: what Muon and LoRA work on."""
    width, queries, keys = config["hidden_size"], attention_width(config), kv_heads(config) * head_dim(config)
    return int(2 * width * (queries + keys) + 3 * width * config["intermediate_size"])


def attention_width(config: Config) -> int:
    """Width of all query heads together."""
    return int(config["num_attention_heads"] * head_dim(config))


def lora_count(config: Config, rank: int) -> int:
    """Parameters of the updates of `distill.adapt`: rank x (inputs + outputs) of each linear layer of the body."""
    width, keys = config["hidden_size"], kv_heads(config) * head_dim(config)
    one = 2 * (width + attention_width(config)) + 2 * (width + keys) + 3 * (width + config["intermediate_size"])
    return int(config["num_hidden_layers"] * rank * one)


def kv_bytes(config: Config, num_bytes: int) -> int:
    """Key and value bytes of one token in all layers."""
    return 2 * config["num_hidden_layers"] * kv_heads(config) * head_dim(config) * num_bytes
