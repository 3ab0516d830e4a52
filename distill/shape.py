"""The target and the shape of the draft: sizes known before a weight is read, then the draft itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.bridge import bridge
from distill.known import PRE_NORM
from distill.models import SizeCount, load_config, load_model, load_tokenizer, model_hash, param_counts, resolve
from distill.prune import layer_plan, measure_importance, prune, pruned_config
from distill.recipe import Recipe
from distill.runs import Run
from distill.teacher import ResponseDataset
from distill.tokens import check_shared

log = logging.getLogger(__name__)

IMPORTANCE_TOK = 4096  # tokens over which importance is measured; 2,000 are enough
BRIDGE_TOK = 16384  # supervised positions that a bridge is fitted to; 8,000 are enough for 1,024 channels
BRIDGE_BATCH_TOK = 2048


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


@dataclass(frozen=True)
class Sizes:
    """The draft's size by both counts, and as parts of the target's by the same count."""

    draft: SizeCount
    stored_frac: float
    read_frac: float

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
        ShapeError: out of `draft.size_frac`, or a shortlist longer than the vocabulary.
        TokenizerMismatch: a pretrained draft that means other tokens.
    """
    stage, head = recipe.draft, recipe.draft.head
    config = draft_config(recipe, target)
    if stage.kind == "pretrained":
        assert stage.model is not None
        check_shared(target.tokenizer, load_tokenizer(stage.model), target.config.vocab_size, config.vocab_size)
    elif stage.bridge and config.model_type not in PRE_NORM:
        raise ShapeError(
            f"draft.bridge: {config.model_type} norms what its layers write, so nothing can be folded there; "
            f"it works for {', '.join(PRE_NORM)}"
        )
    if head.size is not None and head.size > config.vocab_size:
        raise ShapeError(f"draft.head.size = {head.size}: the head has {config.vocab_size} rows, allowed up to that")
    size = draft_size(config, head.size, head.rank)
    sizes = Sizes(size, size.stored / target.size.stored, size.read / target.size.read)
    log.info(
        "draft: %d parameters stored (%.1f%% of the target's %d), %d read per drafted token (%.1f%% of %d)",
        *(size.stored, 100 * sizes.stored_frac, target.size.stored),
        *(size.read, 100 * sizes.read_frac, target.size.read),
    )
    low, high = stage.size_frac
    frac = sizes.stored_frac if stage.size_count == "stored" else sizes.read_frac
    if not low <= frac <= high:
        raise ShapeError(
            f"draft.size_frac = [{low}, {high}]: the draft has {frac:.4f} of the target's parameters by "
            f"draft.size_count = {stage.size_count} (stored {sizes.stored_frac:.4f}, read {sizes.read_frac:.4f}). "
            f"Keep {'fewer' if frac > high else 'more'} layers, change the widths or draft.head, or set other bounds"
        )
    return sizes


def draft_config(recipe: Recipe, target: Target) -> PreTrainedConfig:
    """The draft's config; which of the target's layers it keeps may still be open, its sizes are not."""
    stage = recipe.draft
    if stage.kind == "pretrained":
        assert stage.model is not None
        return load_config(resolve(stage.model))
    count = len(stage.layers) if stage.layers is not None else stage.num_layers
    layers = layer_plan(target.config.num_hidden_layers, stage.layers, count)
    return pruned_config(target.config, layers, stage.hidden_size, stage.intermediate_size, stage.num_kv_heads)


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


@dataclass(frozen=True)
class Made:
    """A draft before its first step.

    Attributes:
        model: in float32.
        factors: (A [V, r], B [r, h]) of a low-rank head; None for the others.
        facts: how it was made, for draft.json: layers kept, fit of the bridge.
    """

    model: PreTrainedModel
    factors: tuple[Tensor, Tensor] | None
    facts: dict[str, Any]


def make_draft(recipe: Recipe, target: Target, model: PreTrainedModel, dataset: ResponseDataset) -> Made:
    """Cuts the draft out of the target, or loads it.

    Args:
        recipe: its draft stage counts.
        target: config and tokenizer.
        model: the target's weights.
        dataset: answers over which importance is measured when layers or widths are chosen by it, and with whose
            cached states a bridge is fitted.

    Returns:
        The draft.
    """
    stage = recipe.draft
    facts: dict[str, Any] = {}
    if stage.kind == "pretrained":
        assert stage.model is not None
        draft = load_model(stage.model, "float32")
    else:
        draft, facts = _cut_draft(recipe, model, dataset)
    head = draft.get_output_embeddings().weight
    return Made(draft, None if stage.head.rank is None else low_rank_factors(head, stage.head.rank), facts)


def _cut_draft(
    recipe: Recipe, model: PreTrainedModel, dataset: ResponseDataset
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The draft cut from the target, its bridge folded in, and how it was made."""
    stage = recipe.draft
    widths = (stage.hidden_size, stage.intermediate_size, stage.num_kv_heads)
    importance = None
    # The engine has put its own attention in, which wants a slab; the passes here are plain ones.
    plain = "eager" if getattr(model.config, "attn_logit_softcapping", None) else "sdpa"
    if stage.choose == "influence" or any(width is not None for width in widths):
        model.set_attn_implementation(plain)
        importance = measure_importance(model, _some_rows(dataset, IMPORTANCE_TOK))
    influence = None if importance is None else importance.influence
    layers = layer_plan(model.config.num_hidden_layers, stage.layers, stage.num_layers, stage.choose, influence)
    state = {name: weight.float().cpu() for name, weight in model.state_dict().items()}
    config, state = prune(model.config, state, layers, *widths, importance)
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draft.load_state_dict(state, strict=True)
    facts: dict[str, Any] = {"layers": layers}
    if stage.bridge:
        draft.set_attn_implementation(plain)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
        size = max(1, min(BRIDGE_BATCH_TOK // max(dataset.lengths), len(order) // 10))
        batches = (dataset.collate(order[at : at + size]) for at in range(0, len(order), size))
        head = model.get_output_embeddings().weight.detach()
        found = bridge(draft.to(model.device).eval(), head, batches, BRIDGE_TOK)
        draft, facts["bridge"] = draft.cpu(), asdict(found)
        log.info(
            "bridge: error of the final state %.3f -> %.3f of the target's (%d positions, ridge %g)",
            *(found.error_before, found.error_after, found.num_tok, found.ridge),
        )
    log.info("draft of the target's layers %s", layers)
    return draft, facts


def _some_rows(dataset: ResponseDataset, num_tok: int) -> Iterator[Tensor]:
    """Input ids [1, T] of rows spread over the data set, until they hold `num_tok` tokens."""
    stride = max(1, sum(dataset.lengths) // num_tok)
    for index in range(0, len(dataset), stride):
        yield dataset[index].input_ids[None]


def low_rank_factors(head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors of a head in the sense of least squares: A = W V_r, B = V_r^T, from the eigenvectors of W^T W.

    Args:
        head: [V, h].
        rank: r, from 1 to h.

    Returns:
        A [V, r] and B [r, h], float32.

    Raises:
        ShapeError: the rank does not fit.
    """
    if not 1 <= rank <= head.shape[1]:
        raise ShapeError(f"draft.head.rank = {rank}: the head is {head.shape[1]} wide, allowed 1..{head.shape[1]}")
    weight = head.detach().float()
    _, vectors = torch.linalg.eigh(weight.T @ weight)
    basis = vectors[:, -rank:]
    return weight @ basis, basis.T.contiguous()


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
