"""The draft folder: an ordinary Hugging Face checkpoint plus draft.json. Write, read, verify.

The folder is whole or absent: it is written beside its final name and renamed at the very end. Other servers ignore
draft.json and use every row of the head; our engine reads the shortlist from it.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.compat import config_for_v4, tokenizer_config_for_v4
from distill.files import file_sha256, read_object, write_json
from distill.tokens import check_shared

log = logging.getLogger(__name__)

FORMAT = 1
# In a folder of its own: servers load every *.safetensors file that lies beside config.json.
FACTORS = Path("low_rank_head") / "factors.safetensors"

# What draft.json holds where it holds it; null is as good as nothing.
KINDS: dict[str, type] = {
    "shortlist": list, "weights_sha256": dict, "target": dict, "traffic": dict, "size": dict, "head": dict,
    "temperature": dict,
}  # fmt: skip


class BrokenDraft(ValueError):
    """A draft folder that is incomplete, damaged, or made for another target."""


@dataclass(frozen=True)
class Draft:
    """A draft as it lies on disk.

    Attributes:
        folder: loads with `AutoModelForCausalLM.from_pretrained`.
        shortlist: [S] ids (ascending) of the head rows the engine uses; None uses every row.
        factors: (A [V, r], B [r, h]) of a low-rank head, float32; None otherwise. The head in the folder is A @ B.
        meta: the content of draft.json.
    """

    folder: Path
    shortlist: Tensor | None
    factors: tuple[Tensor, Tensor] | None
    meta: dict[str, Any]


def write_draft(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    meta: Mapping[str, Any],
    shortlist: Sequence[int] | None = None,
    factors: tuple[Tensor, Tensor] | None = None,
    dtype: str = "bfloat16",
    eos_ids: Sequence[int] = (),
    tokenizer_class: str | None = None,
) -> Path:
    """Writes a draft folder, replacing an older one only when the new one is complete.

    Args:
        folder: final place.
        model: whole model; its weights may be float32 and are saved as `dtype`.
        tokenizer: the tokenizer shared with the target.
        meta: what draft.json shall hold beside format, shortlist and checksum: target, sizes, sources, metrics.
        shortlist: distinct ids of the head rows to use; None is every row.
        factors: (A [V, r], B [r, h]) of a low-rank head.
        dtype: exported dtype: bfloat16, float16 or float32.
        eos_ids: every id that ends a text.
        tokenizer_class: class named by the target's own files, kept when transformers 4.x knows it.

    Returns:
        `folder`.

    Raises:
        BrokenDraft: a weight is not finite, or the shortlist does not fit the head.
        OSError: the disk is full, or cannot be written.
    """
    rows = model.get_output_embeddings().weight.shape[0]
    ids = None if shortlist is None else _checked_shortlist(shortlist, rows)
    broken = [name for name, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if broken:
        raise BrokenDraft(f"{folder}: not written: {len(broken)} tensors hold NaN or infinity, first {broken[0]}")
    exported = copy.deepcopy(model).to(getattr(torch, dtype))
    exported.config.dtype = getattr(torch, dtype)
    exported.generation_config = _generation_config(exported.config, eos_ids)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_room(folder, exported, len(tokenizer))
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        exported.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        path = staging / "config.json"
        write_json(path, config_for_v4(read_object(path, BrokenDraft)), ascii_only=False)
        path = staging / "tokenizer_config.json"
        write_json(path, tokenizer_config_for_v4(read_object(path, BrokenDraft), tokenizer_class), ascii_only=False)
        if factors is not None:
            (staging / FACTORS).parent.mkdir()
            left, right = (value.detach().float().cpu().contiguous() for value in factors)
            save_file({"left": left, "right": right}, staging / FACTORS)
        weights = {path.name: file_sha256(path) for path in sorted(staging.glob("*.safetensors"))}
        whole = {"format": FORMAT, **meta, "dtype": dtype, "shortlist": ids, "weights_sha256": weights}
        write_json(staging / "draft.json", whole, ascii_only=False)
        os.chmod(staging, 0o755)  # mkdtemp makes it private
        _replace_folder(staging, folder)
    except SafetensorError as error:
        raise OSError(f"{folder}: the draft could not be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def read_draft(folder: Path) -> Draft:
    """Reads a draft's description; a plain Hugging Face folder without draft.json is a draft with its whole head.

    Args:
        folder: a folder made by `write_draft`, or any causal LM checkpoint folder.

    Returns:
        The draft; its weights are not read.

    Raises:
        BrokenDraft: no config.json, an unreadable draft.json, another format, or a shortlist that does not fit.
    """
    if not (folder / "config.json").is_file():
        raise BrokenDraft(f"{folder}: no config.json: not a finished draft folder. Train one, or resume its run.")
    if not (folder / "draft.json").is_file():
        return Draft(folder, None, None, {})
    meta = read_object(folder / "draft.json", BrokenDraft)
    if meta.get("format") != FORMAT:
        raise BrokenDraft(f"{folder}/draft.json: format {meta.get('format')!r}, this version reads {FORMAT}")
    _check_meta(folder / "draft.json", meta)
    rows = _rows(folder)
    shortlist = meta.get("shortlist")
    ids = None if shortlist is None else torch.tensor(_checked_shortlist(shortlist, rows), dtype=torch.long)
    factors = _read_factors(folder / FACTORS, rows) if (folder / FACTORS).is_file() else None
    return Draft(folder, ids, factors, meta)


def verify_draft(
    folder: Path, draft_tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase, target_rows: int
) -> Draft:
    """Checks that a draft is whole and speaks the target's tokens.

    Args:
        folder: draft folder.
        draft_tokenizer: tokenizer loaded from `folder`.
        target_tokenizer: the target's.
        target_rows: rows of the target's embedding.

    Raises:
        BrokenDraft: as `whole_draft`.
        TokenizerMismatch: the tokenizers differ, or the rows do not cover the used ids.
    """
    draft = whole_draft(folder)
    check_shared(target_tokenizer, draft_tokenizer, target_rows, _rows(folder))
    return draft


def whole_draft(folder: Path) -> Draft:
    """Reads a draft's description and looks at every weight.

    Raises:
        BrokenDraft: as `read_draft`; or a weight file is missing, cut, changed or not finite.
    """
    draft = read_draft(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BrokenDraft(f"{folder}: no *.safetensors file")
    for name, expected in (draft.meta.get("weights_sha256") or {}).items():
        if not (folder / name).is_file():
            raise BrokenDraft(f"{folder}/{name}: missing")
        if (found := file_sha256(folder / name)) != expected:
            raise BrokenDraft(
                f"{folder}/{name}: sha256 {found[:12]}…, draft.json says {expected[:12]}…: cut or changed"
            )
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                bad = [key for key in tensors.keys() if not torch.isfinite(tensors.get_tensor(key)).all()]  # noqa: SIM118
        except SafetensorError as error:
            raise BrokenDraft(f"{path}: not a whole safetensors file ({error})") from error
        if bad:
            raise BrokenDraft(f"{path}: {len(bad)} tensors hold NaN or infinity, first {bad[0]}")
    return draft


def _check_room(folder: Path, model: PreTrainedModel, num_tokens: int) -> None:
    """Asks for room before anything is written: the tokenizer's own library has no error that could be told apart."""
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters()) + 200 * num_tokens
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise OSError(
            errno.ENOSPC,
            f"the draft takes about {needed / 1e6:.1f} MB, but {free / 1e6:.1f} MB are free; make room",
            str(folder),
        )


def _check_meta(path: Path, meta: Mapping[str, Any]) -> None:
    """What is there must be of the type that is written: others read these keys without asking."""
    for key, kind in KINDS.items():
        if not isinstance(meta.get(key), (kind, type(None))):
            raise BrokenDraft(
                f"{path}: {key} is {meta[key]!r:.80}; it must be a {kind.__name__}: export the draft again"
            )
    fitted = meta.get("temperature") or {"target": 0, "draft": 0}
    inner = (
        ("shortlist", all(type(value) is int for value in meta.get("shortlist") or ())),
        ("weights_sha256", all(isinstance(value, str) for value in (meta.get("weights_sha256") or {}).values())),
        ("temperature", all(type(fitted.get(key)) in (int, float) for key in ("target", "draft"))),
        ("target", isinstance((meta.get("target") or {}).get("sha256", ""), str)),
    )
    if wrong := [key for key, good in inner if not good]:
        raise BrokenDraft(f"{path}: {wrong[0]} is damaged ({meta[wrong[0]]!r:.80}); export the draft again")


def _rows(folder: Path) -> int:
    """Rows of the embedding, as config.json says."""
    rows = read_object(folder / "config.json", BrokenDraft).get("vocab_size")
    if type(rows) is not int or rows < 1:
        raise BrokenDraft(f"{folder}/config.json: vocab_size is {rows!r}; it must be a whole number of rows")
    return rows


def _read_factors(path: Path, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left [rows, r] and right [r, H] of a low-rank head."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise BrokenDraft(f"{path}: not a whole safetensors file ({error})") from error
    left, right = tensors.get("left"), tensors.get("right")
    if left is None or right is None or left.shape != (rows, right.shape[0]):
        shapes = {name: list(value.shape) for name, value in tensors.items()}
        raise BrokenDraft(f"{path}: holds {shapes}; expected left [{rows}, r] and right [r, H]")
    return left, right


def _checked_shortlist(ids: Sequence[int], rows: int) -> list[int]:
    """The ids in ascending order, or an error: they are true token ids, never offsets."""
    if not ids:
        raise BrokenDraft("shortlist: 0 ids; at least 1 is needed")
    values = sorted(int(value) for value in ids)
    if values[0] < 0 or values[-1] >= rows:
        bad = values[0] if values[0] < 0 else values[-1]
        raise BrokenDraft(f"shortlist: id {bad} is not a row of the head, allowed 0..{rows - 1}")
    if len(set(values)) != len(values):
        raise BrokenDraft(f"shortlist: {len(values) - len(set(values))} repeated ids")
    return values


def _generation_config(config: PreTrainedConfig, eos_ids: Sequence[int]) -> GenerationConfig:
    """Greedy, with every id that ends a text: the target's sampling defaults must not travel with the draft."""
    eos = list(eos_ids) or config.eos_token_id
    return GenerationConfig(
        do_sample=False, bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=config.pad_token_id
    )


def _replace_folder(staging: Path, folder: Path) -> None:
    """Puts `staging` in the place of `folder`, which is moved aside first: a rename needs an empty place."""
    old = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent)) / folder.name
        os.replace(folder, old)
    os.replace(staging, folder)
    if old is not None:
        shutil.rmtree(old.parent)
