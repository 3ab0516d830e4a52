"""Finds and loads checkpoints: bundled name, hub id, local folder or GGUF file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distill.convert import ModelUnavailable, convert, fetch, is_whole, lock
from distill.damage import reading
from distill.files import file_sha256, read_object
from distill.known import BUNDLED, SUPPORTED, Bundled, bundled_folder, cache_dir, text_settings
from distill.text_only import text_part

__all__ = [
    "BUNDLED",
    "SUPPORTED",
    "Bundled",
    "ModelUnavailable",
    "SizeCount",
    "UnsupportedModel",
    "cache_dir",
    "load_config",
    "load_model",
    "load_tokenizer",
    "model_hash",
    "param_counts",
    "resolve",
]

log = logging.getLogger(__name__)

# Keys of a config that every supported type counts with.
WHOLE = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnsupportedModel(ValueError):
    """A checkpoint of a kind that is not built for."""


@dataclass(frozen=True)
class SizeCount:
    """A model's size, counted in two ways.

    Attributes:
        stored: all parameters, a tied matrix once.
        read: parameters read for one token: the body and the head's rows in use; the embedding table is a look-up.
    """

    stored: int
    read: int


def resolve(name: str, revision: str | None = None) -> str:
    """Turns a model's name into a local folder that transformers loads; fetches or converts it when needed.

    Args:
        name: bundled name, local folder, .gguf file, or hub id.
        revision: branch, tag or commit of a hub id.

    Returns:
        The folder.

    Raises:
        ModelUnavailable: nothing there, or it could not be fetched.
        UnsupportedModel: its config.json is of a kind that is not built for; no weights are fetched then.
    """
    path = Path(os.path.expanduser(name))  # os.path takes what Path raises for: unknown users, very long names, NUL
    if name in BUNDLED:
        folder = bundled_folder(name)
        with lock(folder):
            if not is_whole(folder):
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temp:
                    convert(fetch(BUNDLED[name], Path(temp)), folder, {"name": name, **asdict(BUNDLED[name])})
    elif path.suffix.lower() == ".gguf":
        if not os.path.isfile(path):
            raise ModelUnavailable(f"{path}: no such GGUF file")
        digest = _cached_sha256([path])
        folder = cache_dir() / f"{path.stem}-{digest[:12]}"
        with lock(folder):
            if not is_whole(folder):
                convert(path, folder, {"name": path.stem})
    elif os.path.isdir(path):
        _check_folder(path)
        folder = text_part(path)
    elif os.path.exists(path) or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelUnavailable(
            f"model {name!r}: neither a bundled name ({', '.join(BUNDLED)}) nor a folder here; "
            "give one of these, a .gguf file, or a hub id (owner/name)"
        )
    else:
        return _from_hub(name, revision)
    _check_folder(folder)
    return str(folder)


def load_model(name: str, dtype: str, device: str = "cpu", trust_remote_code: bool = False) -> PreTrainedModel:
    """Loads a causal LM for inference, free of the checkpoint's sampling defaults.

    Args:
        name: as for `resolve`.
        dtype: float32, bfloat16 or float16.
        device: cpu, cuda, cuda:1 ...
        trust_remote_code: run model code that comes with the checkpoint.

    Returns:
        The model in eval mode. Its generation_config holds only the special ids: temperature, penalties and the like
        of the checkpoint would change results that nobody asked to change.

    Raises:
        ModelUnavailable, UnsupportedModel: as `resolve`; or a weight is missing or of another shape.
    """
    folder = resolve(name)
    with reading(folder, "weights"):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        # transformers would go on with random ones.
        raise ModelUnavailable(
            f"{folder}: {len(missing)} weights are missing, first {missing[0]}; the checkpoint is cut or its "
            "config.json belongs to another: fetch it again"
        )
    ids = {key: getattr(model.generation_config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    return model.to(device).eval()


def load_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that belongs to a checkpoint (arguments and errors as for `resolve` and `load_model`)."""
    folder = resolve(name, revision)
    with reading(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer("a")  # some settings are looked at only here, such as model_max_length
    return tokenizer


def load_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Loads the config of a checkpoint and makes sure that a model can be built of it (as `load_model`, no weights)."""
    folder = resolve(name, revision)
    with reading(folder, "config.json"), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return config


def model_hash(folder: str | Path) -> str:
    """SHA-256 (hex) over config.json and every safetensors file of a checkpoint, names included.

    The hash is kept in the cache folder and made anew when a file's size or time of change differs.

    Raises:
        ModelUnavailable: the folder holds no checkpoint.
    """
    folder = Path(folder)
    _check_folder(folder)
    return _cached_sha256([folder / "config.json", *sorted(folder.glob("*.safetensors"))])


def param_counts(model: PreTrainedModel | PreTrainedConfig, head_rows: int | None = None) -> SizeCount:
    """Counts parameters in both ways, of a model or (without making weights) of a config.

    Of a mixture of experts only the experts that one token visits are read.

    Args:
        model: the model, or its config.
        head_rows: rows of the head in use (the shortlist's); None is all of them.
    """
    if isinstance(model, PreTrainedConfig):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model)
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    config = model.config
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    visited = (getattr(config, "num_experts_per_tok", None) or 1) if num_experts > 1 else 1
    stored = body = 0
    for name, weight in model.named_parameters():  # a tied matrix comes once
        stored += weight.numel()
        if weight is not head and weight is not table:
            body += weight.numel() * visited // num_experts if ".experts." in name else weight.numel()
    rows = head.shape[0] if head_rows is None else head_rows
    return SizeCount(stored=stored, read=body + rows * head.shape[1])


def _from_hub(name: str, revision: str | None) -> str:
    try:
        config = hf_hub_download(name, "config.json", revision=revision)
        _check_type(Path(config), name)
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns)
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelUnavailable(
            f"{name!r} is neither a bundled name ({', '.join(BUNDLED)}) nor a folder here, "
            f"and the hub did not give it: {reason}"
        ) from error
    return str(text_part(Path(folder)))


def _check_folder(folder: Path) -> None:
    """Refuses what cannot be loaded, before any weight is read."""
    config = folder / "config.json"
    if not config.is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; it holds {ggufs[0]}, so give {folder / ggufs[0]}" if ggufs else ""
        raise ModelUnavailable(f"{folder}: no config.json, so no checkpoint{hint}")
    _check_type(config, str(folder))
    if not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(
            f"{folder}: no .safetensors file; pickled weights (.bin, .pt) are not read: "
            "save the model again with save_pretrained"
        )


def _check_type(config: Path, name: str) -> None:
    settings = read_object(config, ModelUnavailable)
    settings = text_settings(settings) or settings
    if settings.get("model_type") not in SUPPORTED:
        raise UnsupportedModel(
            f"{name}: model type {settings.get('model_type')!r} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    for key in WHOLE:
        value = settings.get(key, 1)
        if type(value) is not int or value < 1:
            raise ModelUnavailable(f"{config}: {key} is {value!r:.80}; it must be a whole number above 0")
    if quantised := settings.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnsupportedModel(
            f"{name}: its weights are quantised ({method}); "
            "pruning and distillation need the plain bfloat16 or float16 checkpoint"
        )


def _cached_sha256(paths: list[Path]) -> str:
    """Hash of the files' names and bytes, read again only when a size or time of change differs."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    kept = cache_dir() / "hashes" / key
    if kept.is_file():
        return kept.read_text(encoding="ascii")
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.name}\0{file_sha256(path)}\n".encode())
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False, encoding="ascii") as file:
        file.write(whole.hexdigest())
    os.replace(file.name, kept)
    return whole.hexdigest()
