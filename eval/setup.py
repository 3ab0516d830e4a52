"""From a recipe and draft folders to what is measured: runners, requests and costs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from distill.checkpoint import read_draft, verify_draft
from distill.models import load_model, load_tokenizer, model_hash, param_counts, resolve
from distill.recipe import Recipe
from distill.schema import Eval
from distill.tokens import encode_prompt, eos_ids
from distill.traffic import load_prompts
from engine.bench import copy_bandwidth, measure_costs
from engine.model import Runner
from engine.warp import Warp
from eval.measure import Bench, EvalRequest, Load

log = logging.getLogger(__name__)

# Context classes by prompt tokens.
GROUPS = (("short", 0, 1024), ("medium", 1024, 6144), ("long", 6144, 1 << 40))
PLAN_CONTEXTS = (128, 512)


def device_of(recipe: Recipe) -> str:
    """The device that the recipe's accelerator means here.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if recipe.trainer.accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator is cuda but no CUDA device is there; use cpu or auto")
    return "cuda" if recipe.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def set_up(recipe: Recipe, drafts: dict[str, Path]) -> tuple[Bench, PreTrainedTokenizerBase, dict[str, Any]]:
    """Loads the target and the drafts, each checked against the target's tokenizer.

    Returns:
        the bench, the target's tokenizer, and what the report says of target and drafts.
    """
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device, dtype, code = device_of(recipe), recipe.target.dtype, recipe.target.trust_remote_code
    folder = resolve(recipe.target.model, recipe.target.revision)
    tokenizer = load_tokenizer(folder)
    target = load_model(folder, dtype, device, code)
    rows = target.get_input_embeddings().weight.shape[0]
    # A draft proposes k tokens past the answer's end at most.
    capacity = recipe.traffic.max_prompt_tok + recipe.eval.max_new_tok + max(recipe.eval.k) + 200
    capacity = min(capacity, getattr(target.config, "max_position_embeddings", capacity))
    runners, described = {}, []
    sizes = param_counts(target)
    for name, path in drafts.items():
        verify_draft(path, load_tokenizer(str(path)), tokenizer, rows)
        draft = read_draft(path)
        model = load_model(str(path), dtype, device)
        runners[name] = Runner(model, 1, capacity, draft.shortlist, rows)
        count = param_counts(model, None if draft.shortlist is None else draft.shortlist.numel())
        described.append(
            {
                "name": name,
                "stored_params": count.stored,
                "read_params": count.read,
                "stored_frac": count.stored / sizes.stored,
                "read_frac": count.read / sizes.read,
                "layers": model.config.num_hidden_layers,
                "hidden_size": model.config.hidden_size,
                "head_rows": rows if draft.shortlist is None else draft.shortlist.numel(),
                "trained_on": draft.meta.get("traffic"),
            }
        )
    eos = eos_ids(target.config, target.generation_config, tokenizer)
    stage = recipe.eval
    warps = {name: draft_warp(stage, read_draft(path).meta) for name, path in drafts.items()}
    for about in described:
        about["draft_temperature"] = warps[about["name"]].temperature
    load = Load(stage.max_new_tok, eos, stage.temperature, stage.top_p, stage.top_k, warps, recipe.seed)
    meta = {
        "target_sha256": model_hash(folder),
        "target_params": {"stored": sizes.stored, "read": sizes.read},
        "drafts": described,
        "device": device,
        "num_threads": torch.get_num_threads(),
        "attention": "scaled_dot_product_attention over a slab",
        "graph": "off: no CUDA" if device == "cpu" else "off",
        "eos_ids": list(eos),
    }
    return Bench(Runner(target, 1, capacity, vocab=rows), runners, load), tokenizer, meta


def draft_warp(stage: Eval, meta: Mapping[str, Any]) -> Warp:
    """What a draft samples from: the recipe's setting, else what was fitted for this temperature, else the target's."""
    temperature = stage.temperature
    fitted = meta.get("temperature")
    if stage.draft_temperature is not None:
        temperature = stage.draft_temperature
    elif fitted and temperature > 0 and fitted["target"] == temperature:
        temperature = fitted["draft"]
    return Warp(temperature, 0, stage.draft_top_p)


def group_of(num_tok: int) -> str:
    """Context class of a prompt."""
    return next(name for name, low, high in GROUPS if low <= num_tok < high)


def requests_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[EvalRequest]:
    """The held-out prompts to measure with: the first `eval.num_requests` of each domain that fit.

    Raises:
        ValueError: a domain of eval.domains has none.
    """
    prompts = load_prompts(recipe.traffic, "heldout", recipe.seed, recipe.eval.domains)
    found: list[EvalRequest] = []
    for domain in dict.fromkeys(p.domain for p in prompts):
        count = 0
        for prompt in (p for p in prompts if p.domain == domain):
            ids = encode_prompt(tokenizer, list(prompt.messages), recipe.traffic.system)
            if len(ids) <= recipe.traffic.max_prompt_tok and count < recipe.eval.num_requests:
                found.append(EvalRequest(prompt.id, domain, group_of(len(ids)), tuple(ids)))
                count += 1
        log.info("%s: %d held-out prompts", domain, count)
    if not found:
        raise ValueError(
            f"no held-out prompt of {', '.join(recipe.eval.domains)} has {recipe.traffic.max_prompt_tok} tokens or "
            "less (traffic.max_prompt_tok); raise it, or give other prompts (traffic.heldout)"
        )
    # Domains alternate, so a machine that drifts hurts them alike.
    by_domain = [[r for r in found if r.domain == d] for d in dict.fromkeys(r.domain for r in found)]
    return [row[i] for i in range(max(map(len, by_domain))) for row in by_domain if i < len(row)]


def costs_of(recipe: Recipe, bench: Bench) -> dict[str, Any]:
    """Measured costs of every draft, as plan.json holds them."""
    longest = bench.target.max_positions - 200
    contexts = [c for c in PLAN_CONTEXTS if c <= longest] or [longest]
    costs = []
    for name, runner in bench.drafts.items():
        costs += measure_costs(bench.target, runner, recipe.eval.k, contexts, name=name)
    return {
        "format": 1,
        "device": str(bench.target.device),
        "target": recipe.target.model,
        "bandwidth_bytes_per_s": copy_bandwidth(bench.target.device),
        "costs": [c.to_json() for c in costs],
    }
