"""The draft before its first step: cut from the target, or from what an earlier round left of it, or loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.bridge import bridge
from distill.importance import measure_importance
from distill.models import load_model, resolve
from distill.prune import layer_plan, prune
from distill.recipe import Recipe
from distill.shape import ShapeError, Target, places
from distill.teacher import ResponseDataset

log = logging.getLogger(__name__)

IMPORTANCE_TOK = 4096  # tokens over which importance is measured; 2,000 are enough
BRIDGE_TOK = 16384  # supervised positions that a bridge is fitted to; 8,000 are enough for 1,024 channels
BRIDGE_BATCH_TOK = 2048


@dataclass(frozen=True)
class Source:
    """What a draft is cut from: the target, or what an earlier round left of it.

    Attributes:
        model: its weights.
        layers: the target's layers that it holds.
    """

    model: PreTrainedModel
    layers: list[int]


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


def make_draft(
    recipe: Recipe, target: Target, model: PreTrainedModel, dataset: ResponseDataset, source: Source | None = None
) -> Made:
    """Cuts the draft out of the target, or out of what an earlier round left of it, or loads it.

    Args:
        recipe: its draft stage counts.
        target: config and tokenizer.
        model: the target's weights.
        dataset: answers over which importance is measured when layers or widths are chosen by it, and with whose
            cached states a bridge is fitted.
        source: what it is cut from; None is the target.

    Returns:
        The draft.
    """
    stage = recipe.draft
    facts: dict[str, Any] = {}
    source = source or Source(model, list(range(target.config.num_hidden_layers)))
    if stage.kind == "pretrained":
        assert stage.model is not None
        draft = load_model(resolve(stage.model, stage.revision), "float32")
    else:
        draft, facts = _cut_draft(recipe, source, model.get_output_embeddings().weight.detach(), dataset)
    head = draft.get_output_embeddings().weight
    return Made(draft, None if stage.head.rank is None else low_rank_factors(head, stage.head.rank), facts)


def _cut_draft(
    recipe: Recipe, source: Source, head: Tensor, dataset: ResponseDataset
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The draft cut from its source, its bridge to the target's head folded in, and how it was made."""
    stage, model = recipe.draft, source.model
    widths = (stage.hidden_size, stage.intermediate_size, stage.num_kv_heads)
    importance = None
    # The engine has put its own attention in, which wants a slab; the passes here are plain ones.
    plain = "eager" if getattr(model.config, "attn_logit_softcapping", None) else "sdpa"
    if stage.choose == "influence" or any(width is not None for width in widths):
        model.set_attn_implementation(plain)
        importance = measure_importance(model, _some_rows(dataset, IMPORTANCE_TOK))
    influence = None if importance is None else importance.influence
    named = places(stage.layers, source.layers)
    num = stage.num_layers or len(source.layers)
    layers = layer_plan(len(source.layers), named, num, stage.choose, influence)
    state = {name: weight.float().cpu() for name, weight in model.state_dict().items()}
    config, state = prune(model.config, state, layers, *widths, importance, stage.untie_head)
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draft.load_state_dict(state, strict=True)
    facts: dict[str, Any] = {"layers": [source.layers[at] for at in layers]}
    if stage.bridge:
        draft.set_attn_implementation(plain)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
        size = max(1, min(BRIDGE_BATCH_TOK // max(dataset.lengths), len(order) // 10))
        batches = (dataset.collate(order[at : at + size]) for at in range(0, len(order), size))
        found = bridge(draft.to(model.device).eval(), head, batches, BRIDGE_TOK)
        draft, facts["bridge"] = draft.cpu(), asdict(found)
        log.info(
            "bridge: error of the final state %.3f -> %.3f of the target's (%d positions, ridge %g)",
            *(found.error_before, found.error_after, found.num_tok, found.ridge),
        )
    log.info("draft of the target's layers %s", facts["layers"])
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
