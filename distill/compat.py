"""What transformers 5 writes and 4.x (which servers still run on) would read wrongly or not at all."""

from __future__ import annotations

from typing import Any

# 5.x writes its internal names; 4.x cannot import them.
UNKNOWN_CLASSES = ("", "TokenizersBackend", "PythonBackend", "SentencePieceBackend")


def config_for_v4(config: dict[str, Any]) -> dict[str, Any]:
    """Adds the names that transformers 4.x reads, which would otherwise fall back to its defaults with no error.

    4.x knows `rope_theta`, `rope_scaling`, `rope_local_base_freq` and `torch_dtype`; 5.x writes `rope_parameters`
    (one block, or one for each kind of layer) and `dtype`, and accepts both.

    Args:
        config: contents of config.json as 5.x wrote it.
    """
    extra: dict[str, Any] = {"torch_dtype": config.get("dtype")}
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        if "sliding_attention" in rope:
            extra["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        extra["rope_theta"] = rope["rope_theta"]
        scaled = rope.get("rope_type", "default") != "default"
        extra["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None
    return {**config, **extra}


def tokenizer_config_for_v4(config: dict[str, Any], known_class: str | None = None) -> dict[str, Any]:
    """Names a tokenizer class that transformers 4.x can import, and its keys for added tokens.

    Args:
        config: contents of tokenizer_config.json as 5.x wrote it.
        known_class: class named by the files the tokenizer came from; used when 4.x knows it.
    """
    config = {key: value for key, value in config.items() if key not in ("backend", "is_local", "local_files_only")}
    if (config.get("tokenizer_class") or "") in UNKNOWN_CLASSES:
        known = known_class if known_class and known_class not in UNKNOWN_CLASSES else None
        config["tokenizer_class"] = known or "PreTrainedTokenizerFast"
    # 5.x writes a list where 4.x expects a mapping of names, and 4.x fails on it while loading.
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config
