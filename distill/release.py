"""The folder that people ship: the checks that refuse a draft, and a checkpoint that is whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distill.checkpoint import FACTORS, Draft, read_draft, verify_draft
from distill.files import write_json
from distill.locks import try_lock
from distill.models import load_config, load_model, load_tokenizer, model_hash, resolve
from distill.runs import RunError
from distill.tokens import eos_ids, fingerprint

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class ReleaseRefused(ValueError):
    """A draft that must not be given away as it is."""


@dataclass(frozen=True)
class Target:
    """What a draft is checked against.

    Attributes:
        name, revision: as in the recipe.
        folder: its checkpoint.
        rows: of its embedding table.
        eos: every id that ends a text.
        sha256: of config and weights.
        tokenizer: the one both must share.
    """

    name: str
    revision: str | None
    folder: Path
    rows: int
    eos: tuple[int, ...]
    sha256: str
    tokenizer: PreTrainedTokenizerBase


def read_provenance(run: Path) -> dict[str, Any]:
    """How a run was started: its command, and the commit (None where it was not known).

    Raises:
        RunError: provenance.json is missing or damaged.
    """
    path = run / "provenance.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        command, git = found.get("command", "not recorded"), found.get("git")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise RunError(f"{path}: no provenance can be read there ({error})") from error
    if not isinstance(command, str) or not isinstance(git, dict | None):
        raise RunError(f"{path}: command is {command!r:.80}, git {git!r:.80}: damaged")
    return {"command": command, "git": git}


def read_made(folder: Path) -> dict[str, Any]:
    """draft.json, with all in it that a release needs.

    Raises:
        BrokenDraft: as `read_draft`.
        ReleaseRefused: a part is missing.
    """
    meta = read_draft(folder).meta
    needed = {"target": "sha256", "size": "stored", "head": "kind"}
    missing = [f"{key}.{inner}" for key, inner in needed.items() if inner not in (meta.get(key) or {})]
    missing += ["weights_sha256"] if not meta.get("weights_sha256") else []
    if missing:
        raise ReleaseRefused(
            f"{folder}/draft.json: no {', '.join(missing)}: not as distill.train writes it; train again"
        )
    return meta


def find_target(name: str, revision: str | None) -> Target:
    """Finds a target's checkpoint and reads what a draft is checked against; its weights are not loaded."""
    folder = Path(resolve(name, revision))
    config, tokenizer = load_config(str(folder)), load_tokenizer(str(folder))
    generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    eos = eos_ids(config, generation, tokenizer)
    return Target(name, revision, folder, config.vocab_size, eos, model_hash(folder), tokenizer)


def check_draft(folder: Path, target: Target) -> tuple[Draft, PreTrainedModel]:
    """Every check of a draft folder that needs no report.

    Args:
        folder: draft folder.
        target: of `find_target`.

    Returns:
        the draft, and its model in float32.

    Raises:
        BrokenDraft, TokenizerMismatch: as `verify_draft`.
        ReleaseRefused: made for another target; other rows; a tied head that is not one; eos ids that are not the whole
            list; another splitting rule or chat template; a low-rank head that is not the product of its factors.
    """
    tokenizer = load_tokenizer(str(folder))
    draft = verify_draft(folder, tokenizer, target.tokenizer, target.rows)
    made_for = draft.meta["target"]["sha256"]
    if made_for != target.sha256:
        raise ReleaseRefused(
            f"{folder}: made for a target with sha256 {made_for[:12]}…, but {target.name} is {target.sha256[:12]}…; "
            "use the checkpoint that the run was made with"
        )
    ours, theirs = fingerprint(target.tokenizer), fingerprint(tokenizer)
    for key, what in (("tokenizer_sha256", "merges or splitting rules"), ("template_sha256", "chat template")):
        if ours[key] != theirs[key]:
            raise ReleaseRefused(f"{folder}: the {what} of its tokenizer differ from the target's; export it again")
    found = _json(folder / "generation_config.json").get("eos_token_id")
    found = found if isinstance(found, list) else [] if found is None else [found]
    if sorted(found) != list(target.eos):
        raise ReleaseRefused(
            f"{folder}/generation_config.json: eos_token_id is {found}, the target ends a text with "
            f"{list(target.eos)}; a server would write past the end. Export the draft again"
        )
    model = load_model(str(folder), "float32")
    _check_rows(folder, model, target.rows)
    if draft.factors is not None:
        _check_factors(folder, model, draft.factors)
    return draft, model


@torch.no_grad()
def check_reload(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Loads a written folder as a stock server would and compares its logits with the model it was written from.

    Args:
        folder: the release.
        model: float32, of `check_draft`.
        tokenizer: the target's.

    Raises:
        ReleaseRefused: a logit differs, or the tokenizer reads a text otherwise.
    """
    text = "def add(a, b):\n    return a + b  # 12345 café 😊"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    again = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    if again != ids:
        raise ReleaseRefused(f"{folder}: loaded again, the tokenizer gives {again[:8]}… instead of {ids[:8]}…")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    want, got = (m(torch.tensor([ids])).logits for m in (model, loaded))
    if want.shape != got.shape or not torch.equal(want, got):
        worst = (want - got).abs().max().item() if want.shape == got.shape else float("nan")
        raise ReleaseRefused(f"{folder}: loaded again, logits differ by up to {worst:g}: the files are not the draft's")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends, and is removed when it fails.

    What a killed process left is removed by the next one: a lock tells whether a temporary folder is still in use.

    Raises:
        ReleaseRefused: `folder` exists: a release is not written over.
    """
    if folder.exists():
        raise ReleaseRefused(f"--to {folder}: exists already; remove it, or give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-release-"
    for left in folder.parent.glob(f"{prefix}*"):
        if (lock := try_lock(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    lock = try_lock(staging)
    try:
        yield staging
        for path in staging.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        staging.chmod(0o755)  # mkdtemp makes it private
        os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def write_checkpoint(staging: Path, draft: Draft, target: Target, more: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the draft's files into a release and completes draft.json.

    Args:
        staging: of `staged`.
        draft: of `check_draft`.
        target: of `find_target`.
        more: what draft.json gains.

    Returns:
        the completed draft.json.

    Raises:
        ReleaseRefused: a pickle lies in the draft's folder.
    """
    for path in sorted(draft.folder.iterdir()):
        if path.suffix in PICKLES:
            raise ReleaseRefused(f"{path}: a pickle, which runs code when it is opened, is not released; remove it")
        if path.is_file() and path.name != "draft.json":
            shutil.copyfile(path, staging / path.name)
    if draft.factors is not None:
        (staging / FACTORS).parent.mkdir()
        shutil.copyfile(draft.folder / FACTORS, staging / FACTORS)
    used = target.rows if draft.shortlist is None else draft.shortlist.numel()
    meta = {**draft.meta, **more, "rows": {"stored": target.rows, "used": used}, "eos_ids": list(target.eos)}
    write_json(staging / "draft.json", meta, ascii_only=False)
    return meta


def upload(folder: Path, hub_id: str) -> str:
    """Uploads a release to the hub (a new model repository is private) and returns the commit's address.

    Raises:
        HfHubHTTPError: refused by the hub: no token, no right, no network.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(hub_id, repo_type="model", private=True, exist_ok=True)
    done = api.upload_folder(repo_id=hub_id, folder_path=folder, commit_message="Release of a draft model")
    return str(done.commit_url)


def _check_rows(folder: Path, model: PreTrainedModel, rows: int) -> None:
    """Rows of table and head, and whether the head is tied as config.json says."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for what, weight in (("embedding table", table), ("head", head)):
        if weight.shape[0] != rows:
            raise ReleaseRefused(
                f"{folder}: its {what} has {weight.shape[0]} rows, the target's {rows}; servers ask for the same number"
            )
    said = bool(_json(folder / "config.json").get("tie_word_embeddings"))
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            names |= set(tensors.keys())
    stored = any(name.endswith("lm_head.weight") for name in names)
    if (head is table) != said or stored == said:
        raise ReleaseRefused(
            f"{folder}: config.json says tie_word_embeddings = {said}, but the head "
            f"{'is' if stored else 'is not'} in the weights and {'is' if head is table else 'is not'} the embedding "
            "table when loaded: servers would disagree on the head. Export the draft again"
        )


@torch.no_grad()
def _check_factors(folder: Path, model: PreTrainedModel, factors: tuple[torch.Tensor, torch.Tensor]) -> None:
    product, head = factors[0] @ factors[1], model.get_output_embeddings().weight
    # Rounding to bfloat16 moves a weight by 2^-9 of itself at most; the product is summed in another order here.
    if not torch.allclose(head, product, rtol=2**-8, atol=1e-3 * float(product.std())):
        worst = (product - head).abs().max().item()
        raise ReleaseRefused(f"{folder}: the head is not the product of its low-rank factors (off by up to {worst:g})")


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
