"""From a recipe and draft folders to what is measured: runners, requests and costs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from distill.acceptance import served_warps
from distill.checkpoint import read_draft, verify_draft
from distill.models import load_config, load_model, load_tokenizer, model_hash, param_counts, resolve
from distill.recipe import Recipe
from distill.schema import Eval
from distill.schema_eval import GROUPS
from distill.tokens import eos_ids
from engine.bench import copy_bandwidth, measure_costs
from engine.costs import Costs
from engine.model import Runner
from engine.warp import Warp
from eval.arms import Arm
from eval.decoders import EvalRequest, Load, RequestSet
from eval.inventory import about_draft, doubts, memory_of
from eval.measure import Bench
from eval.prefix import Prefixes
from eval.prompts import Choice, Taken, choose_prompts
from eval.schedule import read_schedule

log = logging.getLogger(__name__)

PLAN_CONTEXTS = (128, 512)


def device_of(recipe: Recipe) -> str:
    """The device that the recipe's accelerator means here.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if recipe.trainer.accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator is cuda but no CUDA device is there; use cpu or auto")
    return "cuda" if recipe.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def graph_of(recipe: Recipe, device: str) -> tuple[bool, str]:
    """Whether steps are captured as CUDA graphs, and why."""
    if device != "cuda":
        return False, "off: no CUDA"
    if not recipe.trainer.graph:
        return False, "off: trainer.graph is false"
    return True, "on: target, chain drafts and acceptance; trees and self-speculation draft eagerly"


@dataclass(frozen=True)
class Traffic:
    """What is measured.

    Attributes:
        requests: domains and groups alternate.
        spare: further prompts of the domain that the draft is for; choosing a tree must not look at the requests.
        choice: of the held-out prompts, with what was left out.
    """

    requests: list[EvalRequest]
    spare: list[EvalRequest]
    choice: Choice


def set_up(recipe: Recipe, drafts: dict[str, Path]) -> tuple[Bench, Traffic, dict[str, Any]]:
    """Loads the target and the drafts, each checked against the target's tokenizer, and takes the requests.

    Returns:
        the bench, the requests, and what the report says of target and drafts.
    """
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    stage = recipe.eval
    scheduled = None if stage.schedule is None else read_schedule(stage.schedule, list(drafts), max(stage.k))
    device, dtype, code = device_of(recipe), recipe.target.dtype, recipe.target.trust_remote_code
    graph, graph_why = graph_of(recipe, device)
    compiled = recipe.trainer.compile
    folder = resolve(recipe.target.model, recipe.target.revision)
    tokenizer = load_tokenizer(folder)
    rows = load_config(folder, trust_remote_code=code).vocab_size
    for path in drafts.values():  # before a large target is loaded
        load_config(str(path))
        verify_draft(path, load_tokenizer(str(path)), tokenizer, rows)
    target = load_model(folder, dtype, device, code)
    traffic = requests_of(recipe, tokenizer, getattr(target.config, "max_position_embeddings", None))
    sha = model_hash(folder)
    batch, capacity = max(stage.batches), capacity_of(stage, traffic.requests, target.config)
    runners, described = {}, []
    sizes = param_counts(target)
    memory = {"": memory_of(target, sizes.stored)}
    for name, path in drafts.items():
        draft = read_draft(path)
        model = load_model(str(path), dtype, device)
        for arm in (Arm(name, 1), *(Arm(name, 1, recent=recent) for recent in stage.windows)):
            runners[arm.runner] = Runner(
                model,
                batch,
                capacity,
                draft.shortlist,
                rows,
                compile=compiled,
                recent=arm.recent,
                factors=draft.factors,
            )
        about = about_draft(name, model, draft, sizes, rows)
        about["doubts"] = list(doubts(name, draft.meta, sha))
        for text in about["doubts"]:
            log.warning("%s", text)
        memory[name] = memory_of(model, about["stored_params"])
        described.append(about)
    eos = eos_ids(target.config, target.generation_config, tokenizer)
    warps = {name: draft_warp(stage, read_draft(path).meta) for name, path in drafts.items()}
    for about in described:
        about["draft_temperature"] = warps[about["name"]].temperature
    # What is simulated is no text, so that nothing in it ends an answer; the baseline answers as long.
    ends = () if stage.simulate else eos
    load = Load(stage.max_new_tok, ends, stage.temperature, stage.top_p, stage.top_k, warps, recipe.seed)
    meta = {
        "target_sha256": sha,
        "target_params": {"stored": sizes.stored, "read": sizes.read},
        "drafts": described,
        "device": device,
        "num_threads": torch.get_num_threads(),
        "attention": "scaled_dot_product_attention over a slab",
        "graph": graph_why,
        "compile": "on: chain steps" if compiled else "off: trainer.compile is false",
        "eos_ids": list(eos),
        **traffic.choice.told(),
        "memory": memory,
        "scheduled": None if scheduled is None else scheduled.about(r.id for r in traffic.requests),
    }
    runner = Runner(target, batch, capacity, vocab=rows, compile=compiled)
    tables = {} if scheduled is None else scheduled.tables
    # At batch 1 alone each prompt is read once anyway.
    slabs = [r.slab for r in (runner, *runners.values()) if r.device.type == "cpu"]
    laid_out = batch * sum(slab.row_nbytes(capacity) for slab in slabs)
    prefixes = Prefixes(_prefix_bytes(stage.prefix_gib, laid_out) if batch > 1 else 0)
    return Bench(runner, runners, load, graph, tables=tables, prefixes=prefixes), traffic, meta


def _prefix_bytes(gib: float, slabs: int) -> int:
    """Bytes for prompts that were read: what the recipe allows, but no more than three quarters of the free memory.

    Args:
        gib: eval.prefix_gib.
        slabs: bytes of host memory that slabs will take when their rows are full.
    """
    free = max(0.0, (psutil.virtual_memory().available - slabs) * 3 / 4)
    if free < gib * 2**30:
        log.info("eval.prefix_gib = %s: there is room for %.1f GiB beside the rows, which is taken", gib, free / 2**30)
    return int(min(gib * 2**30, free))


def capacity_of(stage: Eval, requests: Sequence[EvalRequest], config: PreTrainedConfig) -> int:
    """Positions of a slab row: the longest prompt, its answer, and what a draft proposes past its end.

    The 200 more are what timing cycles needs beyond a plan's longest context, which is a prompt of the same length.
    """
    past_end = max(*stage.k, stage.tree_nodes or 0)
    need = max(*PLAN_CONTEXTS, *(len(r.ids) for r in requests)) + stage.max_new_tok + past_end + 200
    return min(need, getattr(config, "max_position_embeddings", need))


def draft_warp(stage: Eval, meta: Mapping[str, Any]) -> Warp:
    """What a draft samples from: the recipe's setting, else what was fitted for this temperature, else the target's."""
    own, fitted = served_warps(stage)[1], meta.get("temperature")
    if stage.draft_temperature is None and fitted and 0 < stage.temperature == fitted["target"]:
        own = replace(own, temperature=fitted["draft"])
    return own


def requests_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, positions: int | None = None) -> Traffic:
    """The requests to measure with (`prompts.choose_prompts`).

    Args:
        recipe: its traffic and eval stages.
        tokenizer: the target's.
        positions: that the target has; None is no limit.

    Raises:
        ValueError: none is left.
    """
    choice = choose_prompts(recipe, tokenizer, positions)
    cells = [[_request(taken) for taken in cell] for cell in choice.cells.values()]
    # They alternate, so a machine that drifts hurts them alike.
    found = [cell[i] for i in range(max(map(len, cells))) for cell in cells if i < len(cell)]
    return Traffic(found, [_request(taken) for taken in choice.spare], choice)


def _request(taken: Taken) -> EvalRequest:
    return EvalRequest(taken.prompt.id, taken.prompt.domain, taken.group, taken.ids)


def sets_of(requests: Sequence[EvalRequest], batch: int, num_sets: int) -> list[RequestSet]:
    """Sets of 2 * batch requests, taken in turns from each domain and group.

    Each has `num_sets` of them, or as many as it takes to measure every request once where that is more.
    Where there are too few requests they come again as repeats, which count as one request: a row must not stay empty.
    """
    cells: dict[tuple[str, str], list[EvalRequest]] = {}
    for request in requests:
        cells.setdefault((request.domain, request.group), []).append(request)
    made: list[RequestSet] = []
    size = 2 * batch
    wanted = {key: max(num_sets, ceil(len(cell) / size)) for key, cell in cells.items()}
    for number in range(max(wanted.values(), default=0)):
        for key, cell in cells.items():
            if number >= wanted[key]:
                continue
            picked = []
            for place in range(number * size, (number + 1) * size):
                again, request = place // len(cell), cell[place % len(cell)]
                picked.append(replace(request, repeat=again))
            made.append(RequestSet(len(made), tuple(picked)))
    return made


def contexts_of(requests: Sequence[EvalRequest]) -> list[int]:
    """Contexts that costs are measured at: 128 and 512, and the median prompt of each longer group."""
    found = set(PLAN_CONTEXTS)
    for group in {r.group for r in requests} - {GROUPS[0][0]}:
        found.add(round(median(len(r.ids) for r in requests if r.group == group)))
    return sorted(found)


def costs_of(recipe: Recipe, bench: Bench, requests: Sequence[EvalRequest] = ()) -> dict[str, Any]:
    """Measured costs of every draft at every batch, as plan.json holds them; the bench's policies get them too."""
    longest = bench.target.max_positions - 200
    contexts = sorted({min(c, longest) for c in contexts_of(requests)})
    costs: list[Costs] = []
    for batch in recipe.eval.batches:
        for name, runner in bench.drafts.items():
            ks = recipe.eval.k
            costs += measure_costs(bench.target, runner, ks, contexts, batch, name=name, graph=bench.graph)
    bench.costs = costs
    return {
        "format": 1,
        "device": str(bench.target.device),
        "target": recipe.target.model,
        "bandwidth_bytes_per_s": copy_bandwidth(bench.target.device),
        "costs": [c.to_json() for c in costs],
    }
