"""The target and the shape of the draft: sizes known before a weight is read. `distill.draft` makes the draft."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint import read_draft
from distill.known import PRE_NORM, draft_folder
from distill.models import SizeCount, load_config, load_tokenizer, model_hash, param_counts, resolve
from distill.prune import layer_plan, pruned_config
from distill.recipe import Draft, Recipe, Round
from distill.runs import Run
from distill.tokens import check_shared

log = logging.getLogger(__name__)


class ShapeError(ValueError):
    """A draft that does not fit the target or the recipe's bounds."""


@dataclass(frozen=True)
class Target:
    """The model to be sped up, before its weights are read.

    Attributes:
        folder, sha256: where the checkpoint lies, and its hash.
        config, tokenizer: its own.
        size: both counts.
    """

    folder: str
    sha256: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    size: SizeCount

    @property
    def positions(self) -> int | None:
        """Positions that it has, where its config says so."""
        return getattr(self.config, "max_position_embeddings", None)


@dataclass(frozen=True)
class Sizes:
    """The draft's size by both counts, and as parts of the target's by the same count."""

    draft: SizeCount
    stored_frac: float
    read_frac: float

    def frac(self, size_count: str) -> float:
        """Part of the target by draft.size_count."""
        return self.stored_frac if size_count == "stored" else self.read_frac

    def to_json(self) -> dict[str, float]:
        """For draft.json."""
        return {
            "stored": self.draft.stored,
            "read": self.draft.read,
            "stored_frac": self.stored_frac,
            "read_frac": self.read_frac,
        }


def find_target(recipe: Recipe) -> Target:
    """Finds the target (fetching it once if need be) and reads everything but its weights."""
    stage = recipe.target
    folder = resolve(stage.model, stage.revision)
    config = load_config(folder, trust_remote_code=stage.trust_remote_code)
    return Target(folder, model_hash(folder), config, load_tokenizer(folder), param_counts(config))


def check_draft(recipe: Recipe, target: Target) -> Sizes:
    """Works out the draft's shape and refuses it when it is out of bounds, before any weight is read.

    Args:
        recipe: its draft stage counts.
        target: what the draft is compared with.

    Returns:
        The sizes.

    Raises:
        PruneError: a shape that cannot be cut from this target.
        BrokenDraft: a pretrained draft of this project whose draft.json can not be read.
        ShapeError: out of `draft.size_frac`, a shortlist longer than the vocabulary, or factors wider than the head.
        TokenizerMismatch: a pretrained draft that means other tokens.
    """
    stage, head = recipe.draft, recipe.draft.head
    config = draft_config(recipe, target.config)
    if stage.kind == "pretrained":
        assert stage.model is not None
        spoken = load_tokenizer(stage.model, stage.revision)
        check_shared(target.tokenizer, spoken, target.config.vocab_size, config.vocab_size)
        if (own := own_rows(stage)) is not None and len(own) != head.size:
            log.warning(
                "draft.model %s was trained with a shortlist of %d rows; draft.head = {kind: shortlist, size: %d} "
                "keeps it",
                *(stage.model, len(own), len(own)),
            )
    elif stage.bridge and config.model_type not in PRE_NORM:
        raise ShapeError(
            f"draft.bridge: {config.model_type} norms what its layers write, so nothing can be folded there; "
            f"it works for {', '.join(PRE_NORM)}"
        )
    if head.size is not None and head.size > config.vocab_size:
        raise ShapeError(f"draft.head.size = {head.size}: the head has {config.vocab_size} rows, allowed up to that")
    if head.rank is not None and head.rank > config.hidden_size:
        raise ShapeError(f"draft.head.rank = {head.rank}: the head is {config.hidden_size} wide, allowed up to that")
    size = draft_size(config, head.size, head.rank)
    sizes = Sizes(size, size.stored / target.size.stored, size.read / target.size.read)
    log.info(
        "draft: %d parameters stored (%.1f%% of the target's %d), %d read per drafted token (%.1f%% of %d)",
        *(size.stored, 100 * sizes.stored_frac, target.size.stored),
        *(size.read, 100 * sizes.read_frac, target.size.read),
    )
    low, high = stage.size_frac
    frac = sizes.frac(stage.size_count)
    if not low <= frac <= high:
        raise ShapeError(
            f"draft.size_frac = [{low}, {high}]: the draft has {frac:.4f} of the target's parameters by "
            f"draft.size_count = {stage.size_count} (stored {sizes.stored_frac:.4f}, read {sizes.read_frac:.4f}). "
            f"Keep {'fewer' if frac > high else 'more'} layers, change the widths or draft.head, or set other bounds"
        )
    return sizes


def own_rows(draft: Draft) -> Tensor | None:
    """The shortlist [S] that a pretrained draft of this project was trained with, or None.

    Raises:
        BrokenDraft: its draft.json can not be read.
    """
    folder = draft_folder(draft.model)
    return None if folder is None else read_draft(folder).shortlist


def draft_config(recipe: Recipe, target: PreTrainedConfig) -> PreTrainedConfig:
    """The draft's config; which of the target's layers it keeps may still be open, its sizes are not.

    Args:
        recipe: its draft is one draft; a width that it leaves open is that of the last round that names one.
        target: the target's config.

    Raises:
        ValueError: a shape that can not be cut; a ShapeError, with its number, in a round.
    """
    stage = recipe.draft
    if stage.kind == "pretrained":
        assert stage.model is not None
        return load_config(stage.model, stage.revision)
    config, held = target, list(range(target.num_hidden_layers))
    shapes: tuple[Round | Draft, ...] = (*stage.rounds, stage)
    for number, one in enumerate(shapes):
        try:
            layers = layer_plan(len(held), places(one.layers, held), one.num_layers or len(held))
            widths = one.hidden_size, one.intermediate_size, one.num_kv_heads
            config = pruned_config(config, layers, *widths, untie_head=one is stage and stage.untie_head)
        except ValueError as error:
            if number == len(stage.rounds):
                raise
            raise ShapeError(f"draft.rounds[{number}]: {error}") from error
        held = [held[at] for at in layers]
    return config


def places(layers: Sequence[int] | None, held: Sequence[int]) -> list[int] | None:
    """Where a model that holds some of the target's layers has those that are named; None is no names.

    Raises:
        ShapeError: the target has no such layer.
    """
    if layers is None:
        return None
    if len(held) == held[-1] + 1:  # nothing is gone yet; `layer_plan` checks the range
        return list(layers)
    if lost := [layer for layer in layers if layer not in held]:
        raise ShapeError(f"draft.layers {list(layers)}: {lost} are not among the layers there are: {list(held)}")
    return [held.index(layer) for layer in layers]


def draft_size(config: PreTrainedConfig, head_rows: int | None = None, rank: int | None = None) -> SizeCount:
    """A draft's size in both counts: of a shortlist its rows are read, of a low-rank head the factors.

    Args:
        config: the draft's.
        head_rows: of a shortlist; None is every row.
        rank: of a low-rank head; what is stored then is the dense head of its own that is exported.
    """
    if rank is None:
        return param_counts(config, head_rows)
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    whole = param_counts(untied)
    return SizeCount(whole.stored, param_counts(untied, 0).read + rank * (config.vocab_size + config.hidden_size))


def blank_factors(config: PreTrainedConfig, rank: int | None) -> tuple[Tensor, Tensor] | None:
    """Factors of a low-rank head with nothing in them, for measuring a shape; None without a rank."""
    if rank is None:
        return None
    return torch.zeros(config.vocab_size, rank), torch.zeros(rank, config.hidden_size)


def describe(
    recipe: Recipe,
    run: Run,
    target: Target,
    sizes: Sizes,
    facts: dict[str, Any],
    manifest: dict[str, Any],
    best: dict[str, Any],
    step: int,
) -> dict[str, Any]:
    """What draft.json says of a draft: where it comes from, what it was trained on, how good it is.

    Args:
        recipe: resolved.
        run: for the id.
        target: name and hash.
        sizes: both counts.
        facts: how the draft was made.
        manifest: of the training answers.
        best: figures of the chosen validation.
        step: optimizer steps taken.
    """
    stage = recipe.draft
    keys = ("asked", "answered", "dropped")
    return {
        "target": {"name": recipe.target.model, "revision": recipe.target.revision, "sha256": target.sha256},
        "size": sizes.to_json(),
        "kind": stage.kind,
        "layers": facts.get("layers"),
        "bridge": facts.get("bridge"),
        "lora": None if stage.lora is None else stage.lora.model_dump(mode="json"),
        "head": stage.head.model_dump(mode="json"),
        "draft_temperature": recipe.eval.draft_temperature,
        "traffic": {"domain": recipe.traffic.domain, "train": recipe.traffic.train},
        "answers": {"source": recipe.responses.source, **{key: manifest.get(key) for key in keys}},
        "loss": dict(recipe.distill.loss),
        "steps": step,
        "metrics": best,
        "run": run.run_id,
    }
