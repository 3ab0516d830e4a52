"""From prompts to a draft folder: answers, cut, steps, export. What every process of a run does; `distill.train` is the
entry around it.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from distill.adapt import merge_lora
from distill.checkpoint import read_draft, verify_draft, write_draft
from distill.curves import draw_curves
from distill.launch import ALONE, Board, Place
from distill.models import load_model, load_tokenizer
from distill.race import Answers, check_all, contenders, run_race
from distill.recipe import Recipe
from distill.replay import fit_with_replay, replay_facts
from distill.rounds import round_facts, run_rounds
from distill.runs import Run, Stop
from distill.shape import describe, draft_config, find_target
from distill.shards import read_manifest
from distill.stages import prepare, trained_on, write_answers
from distill.surroundings import choose_device, slow_products
from distill.teacher import ResponseDataset
from distill.teacher_topk import check_topk, write_topk
from distill.tokens import eos_ids, tokenizer_class
from distill.track import NullTracker
from engine.pack import cpu_has_bf16

log = logging.getLogger(__name__)


def train(
    recipe: Recipe, run: Run, stop: Stop, tracker: NullTracker, place: Place = ALONE, board: Board | None = None
) -> Path:
    """From prompts to a draft folder.

    Args:
        recipe: resolved recipe.
        run: gets every file.
        stop: signals.
        tracker: gets curves, tables and the draft.
        place: this process among those of the run.
        board: tells the others, which a launcher has started, that the answers and costs are there.

    Returns:
        The draft folder.

    Raises:
        ValueError: something in the recipe, the models or the traffic does not fit.
        Interrupted: a signal arrived.
    """
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device = choose_device(recipe, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    first = place.rank == 0
    if device == "cuda":
        torch.cuda.set_device(place.local_rank)
    if first and (told := slow_products(recipe, device, cpu_has_bf16())):
        log.warning("%s", told)
    pl.seed_everything(recipe.seed, verbose=False)
    stage = recipe.distill

    target = find_target(recipe)
    sizes = check_all(recipe, target)
    rows = target.config.vocab_size
    if stage.teacher == "topk":  # a draft with fewer rows (padding) has none for the target's last ones
        rows = min(rows, *(draft_config(one, target.config).vocab_size for one in contenders(recipe)))
        check_topk(stage.teacher_topk, rows)
    if stage.reference is not None:
        read_draft(Path(stage.reference))  # before its tokenizer is looked for
        spoken = load_tokenizer(stage.reference)
        verify_draft(Path(stage.reference), spoken, target.tokenizer, target.config.vocab_size)
    model = load_model(target.folder, recipe.target.dtype, device, recipe.target.trust_remote_code)
    eos = eos_ids(target.config, model.generation_config, target.tokenizer)
    softcap = getattr(target.config, "final_logit_softcapping", None)
    if first:
        write_answers(recipe, run, target, model, eos)
        if stage.teacher == "topk":
            write_topk(run.responses, model.get_output_embeddings().weight[:rows], stage.teacher_topk, softcap)
    dataset = ResponseDataset(run.responses, stage.max_length)
    held_out = ResponseDataset(run.validation, stage.max_length)
    manifest = read_manifest(run.responses)
    _announce(recipe, dataset, manifest["asked"])

    answers, named = Answers(dataset, held_out, eos), tokenizer_class(target.folder)
    ranked: list[dict[str, Any]] = []
    if recipe.draft.kind == "race":
        recipe, ranked = run_race(recipe, run, target, model, sizes, answers, stop, tracker)
    size = sizes[ranked[0]["candidate"] if ranked else 0]
    recipe, source = run_rounds(recipe, run, target, model, answers, stop, named)
    stage = recipe.distill
    ready = prepare(recipe, run, target, model, dataset, held_out, eos, source)
    module, validation, facts = ready.module, ready.validation, ready.facts
    del model, source, ready  # the target's body is not needed any more, unless it is the teacher
    resume_from = run.newest_whole() if run.attempt or ranked else None
    if board is not None:
        board.tell(run)
    rest = resume_from, target, eos, device, place
    best = fit_with_replay(recipe, run, module, trained_on(stage, dataset), validation, stop, tracker, *rest)
    if not first:
        return run.draft
    stop.check()
    fitted = module.fit_temperature(validation)
    log.info(
        "draft temperature for a target at %g: %g (overlap %.3f; %.3f at the target's own)",
        *(fitted.target, fitted.draft, fitted.overlap, fitted.overlap_same),
    )
    exported, factors = module.export()
    if recipe.draft.lora is not None:
        exported = merge_lora(exported)
    meta = {"temperature": asdict(fitted)} | describe(recipe, run, target, size, facts, manifest, best, stage.max_steps)
    meta |= round_facts(recipe, run) | replay_facts(recipe, run) | ({"race": ranked} if ranked else {})
    ids = None if module.shortlist is None else module.shortlist.tolist()
    curves = draw_curves(run.folder / "train.jsonl", run.folder / "curves.svg")
    # Last: where there is a draft, a resumed run has nothing left to do but the link.
    write_draft(run.draft, exported, target.tokenizer, meta, ids, factors, recipe.draft.dtype, eos, named)
    run.link_latest()
    tracker.summary({**best, "size": size.to_json(), "draft_folder": str(run.draft)})
    tracker.figure(best["step"], "curves", curves)
    tracker.artifact(f"draft-{recipe.name}", run.draft, {key: meta[key] for key in ("target", "size", "metrics")})
    log.info("draft of step %s: %s", best["step"], run.draft)
    return run.draft


def _announce(recipe: Recipe, dataset: ResponseDataset, num_prompts: int) -> None:
    """What is about to be trained on, before the first step."""
    stage = recipe.distill
    supervised, total = sum(dataset.num_supervised), sum(dataset.lengths)
    tokens = stage.tokens_per_step * stage.accumulate * recipe.trainer.num_processes
    log.info(
        "training on %d prompts, %d answers, %d supervised tokens (%s answers; dropped: %s; cut at max_length: %d; "
        "ended in a repetition: %d)",
        *(num_prompts, len(dataset), supervised, recipe.responses.source, dataset.num_dropped, dataset.num_cut),
        sum(row.finish == "loop" for row in dataset.rows),
    )
    log.info(
        "%d steps of at most %d tokens (about %d supervised, %.1f answers; accumulate %d, processes %d): %.1f epochs",
        *(stage.max_steps, tokens, tokens * supervised // total, tokens * len(dataset) / total, stage.accumulate),
        recipe.trainer.num_processes,
        stage.max_steps * tokens / total,
    )
