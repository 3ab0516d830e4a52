"""python -m distill.train RECIPE [key=value ...] [--check] [--resume RUN]: from a recipe to a distilled draft.

Exit code 0: the draft is there; 2: bad input; 1: the machine failed (disk full); 130 or 143: SIGINT or SIGTERM, with a
checkpoint to resume from.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.look import look
from distill.recipe import Recipe, dump, load_recipe, recipe_hash
from distill.runs import RUN_ATTEMPT, RUN_FOLDER, Interrupted, Run, RunError, Stop, create_run, rank, reopen_run
from distill.schema import Target as TargetStage
from distill.schema import paths, sources

if TYPE_CHECKING:
    from distill.teacher import ResponseDataset
    from distill.track import NullTracker

log = logging.getLogger("distill.train")  # not __main__


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and trains.

    Args:
        argv: arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m distill.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a recipe, such as recipes/code.yaml (with --resume: the run's own)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--check", action="store_true", help="validate, estimate, print the recipe, and stop")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run folder")
    args = parser.parse_intermixed_args(argv)
    if args.recipe and "=" in args.recipe and not Path(args.recipe).exists():
        args.recipe, args.overrides = None, [args.recipe, *args.overrides]
    if not args.recipe and args.resume is None:
        parser.error("a recipe is needed, for example recipes/code.yaml")
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s", handlers=[terminal])
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("distill").setLevel(logging.DEBUG)
    logging.raiseExceptions = False  # a full disk is told once, not with a traceback for each line of train.log
    try:
        source = args.recipe or args.resume / "recipe.json"
        recipe = load_recipe(source, args.overrides)
        if args.check:
            for text in look(recipe, str(source)):
                sys.stderr.write(f"{text}\n")
            sys.stdout.write(dump(recipe) + "\n")
            return 0
        with Stop().listening() as stop:
            return _run(recipe, args.resume, stop)
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _run(recipe: Recipe, resume: Path | None, stop: Stop) -> int:
    """Opens the run folder, tracks the run, and gives it an honest end."""
    _check_launcher()
    _stay_offline(recipe)
    _quiet()
    if rank() > 0:
        return _join(recipe, stop)
    from distill.provenance import collect
    from distill.track import start

    provenance = collect(recipe.seed)
    run = create_run(recipe, provenance) if resume is None else reopen_run(resume, recipe, provenance)
    handler = logging.FileHandler(run.folder / "train.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    log.info("run %s", run.folder)
    try:
        if _finished(recipe, run):
            return 0
        config = {
            "recipe": recipe.model_dump(mode="json"),
            "recipe_sha256": recipe_hash(recipe),
            "provenance": provenance,
            "target": recipe.target.model,
            "draft": recipe.draft.model or f"{recipe.draft.kind} of {recipe.target.model}",
        }
        tracker = start(recipe.track, run.folder, run.run_id, config, attempt=run.attempt)
        code = 1
        try:
            train(recipe, run, stop, tracker)
            code = 0
        except Interrupted as interrupt:
            code = 128 + interrupt.signum
            has = f"its newest checkpoint is {run.last}" if run.last.exists() else "it has no checkpoint yet"
            log.error("interrupted: no draft was exported; %s", has)
            log.error("go on with: python -m distill.train --resume %s", run.folder)
            raise
        except (ValueError, OSError):
            log.debug("failed", exc_info=True)  # train.log keeps where; the person gets the message alone
            raise
        finally:
            stop.deferred = True  # a signal that comes only now changes nothing any more
            with suppress(OSError):  # a full disk, which must not hide what is being told
                tracker.finish(code)
        return 0
    finally:
        logging.getLogger().removeHandler(handler)
        with suppress(OSError):
            handler.close()


def _join(recipe: Recipe, stop: Stop) -> int:
    """What a process does that the first one of a run has started: it trains with it and writes nothing."""
    from distill.track import NullTracker

    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("distill").setLevel(logging.WARNING)
    train(recipe, Run(Path(os.environ[RUN_FOLDER]), int(os.environ[RUN_ATTEMPT])), stop, NullTracker())
    return 0


def _check_launcher() -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and RUN_FOLDER not in os.environ:
        raise RunError(
            "WORLD_SIZE is set, so a launcher has started several processes; start one: it starts the others itself "
            "(trainer.devices)"
        )


def train(recipe: Recipe, run: Run, stop: Stop, tracker: NullTracker) -> Path:
    """From prompts to a draft folder.

    Args:
        recipe: resolved recipe.
        run: gets every file.
        stop: signals.
        tracker: gets curves, tables and the draft.

    Returns:
        The draft folder.

    Raises:
        ValueError: something in the recipe, the models or the traffic does not fit.
        Interrupted: a signal arrived.
    """
    import lightning.pytorch as pl
    import torch

    from distill.adapt import merge_lora
    from distill.checkpoint import read_draft, verify_draft, write_draft
    from distill.curves import draw_curves
    from distill.fit import fit
    from distill.models import load_model, load_tokenizer
    from distill.race import Answers, check_all, run_race
    from distill.shape import describe, find_target
    from distill.shards import read_manifest
    from distill.stages import prepare, trained_on, write_answers
    from distill.teacher import ResponseDataset
    from distill.teacher_topk import check_topk, write_topk
    from distill.tokens import eos_ids

    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device, first = _device(recipe, torch.cuda.device_count() if torch.cuda.is_available() else 0), rank() == 0
    if device == "cuda":
        torch.cuda.set_device(rank())
    pl.seed_everything(recipe.seed, verbose=False)
    stage = recipe.distill

    target = find_target(recipe)
    sizes = check_all(recipe, target)
    if stage.teacher == "topk":
        check_topk(stage.teacher_topk, target.config.vocab_size)
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
            write_topk(run.responses, model.get_output_embeddings().weight, stage.teacher_topk, softcap)
    dataset = ResponseDataset(run.responses, stage.max_length)
    held_out = ResponseDataset(run.validation, stage.max_length)
    manifest = read_manifest(run.responses)
    _announce(recipe, dataset, manifest["asked"])

    ranked: list[dict[str, Any]] = []
    if recipe.draft.kind == "race":
        answers = Answers(dataset, held_out, eos)
        recipe, ranked = run_race(recipe, run, target, model, sizes, answers, stop, tracker)
    size = sizes[ranked[0]["candidate"] if ranked else 0]
    ready = prepare(recipe, run, target, model, dataset, held_out, eos)
    module, validation, facts = ready.module, ready.validation, ready.facts
    del model, ready  # the target's body is not needed any more, unless it is the teacher
    resume_from = run.newest_whole() if run.attempt or ranked else None
    best = fit(recipe, run, module, trained_on(stage, dataset), validation, stop, tracker, resume_from)
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
    meta |= {"race": ranked} if ranked else {}
    ids = None if module.shortlist is None else module.shortlist.tolist()
    named = _tokenizer_class(target.folder)
    write_draft(run.draft, exported, target.tokenizer, meta, ids, factors, recipe.draft.dtype, eos, named)
    run.link_latest()
    tracker.summary({**best, "size": size.to_json(), "draft_folder": str(run.draft)})
    tracker.figure(best["step"], "curves", draw_curves(run.folder / "train.jsonl", run.folder / "curves.svg"))
    tracker.artifact(f"draft-{recipe.name}", run.draft, {key: meta[key] for key in ("target", "size", "metrics")})
    log.info("draft of step %s: %s", best["step"], run.draft)
    return run.draft


def _finished(recipe: Recipe, run: Run) -> bool:
    """Has the run taken all its steps and exported its draft? Says what a resumption does to the schedule."""
    if run.attempt == 0 or (newest := run.newest_whole()) is None:
        return False
    from distill.fit import checkpoint_step

    step, end = checkpoint_step(newest), recipe.distill.max_steps
    if step >= end and (run.draft / "draft.json").exists():
        log.info("nothing to do: the run is at step %d of %d and its draft is %s", step, end, run.draft)
        return True
    log.info("resuming at step %d of %d; the learning rate follows the cosine that ends at step %d", step, end, end)
    return False


def _announce(recipe: Recipe, dataset: ResponseDataset, num_prompts: int) -> None:
    """What is about to be trained on, before the first step."""
    stage = recipe.distill
    supervised, total = sum(dataset.num_supervised), sum(dataset.lengths)
    tokens = stage.tokens_per_step * stage.accumulate * recipe.trainer.devices
    log.info(
        "training on %d prompts, %d answers, %d supervised tokens (%s answers; dropped: %s; cut at max_length: %d)",
        *(num_prompts, len(dataset), supervised, recipe.responses.source, dataset.num_dropped, dataset.num_cut),
    )
    log.info(
        "%d steps of at most %d tokens (about %d supervised, %.1f answers; accumulate %d, processes %d): %.1f epochs",
        *(stage.max_steps, tokens, tokens * supervised // total, tokens * len(dataset) / total, stage.accumulate),
        recipe.trainer.devices,
        stage.max_steps * tokens / total,
    )


def _device(recipe: Recipe, num_gpus: int) -> str:
    trainer = recipe.trainer
    if trainer.accelerator == "cuda" and not num_gpus:
        raise RunError("trainer.accelerator = cuda, but no CUDA device is there; use cpu or auto")
    device = "cuda" if num_gpus and trainer.accelerator != "cpu" else "cpu"
    if device == "cuda" and trainer.devices > num_gpus:
        raise RunError(
            f"trainer.devices = {trainer.devices}: one CUDA device each, and {num_gpus} of them are there; use at most "
            f"{num_gpus}, or trainer.accelerator: cpu"
        )
    return device


def _stay_offline(recipe: Recipe) -> None:
    """Forbids the hub where the recipe does not need it. Must come before the first import that reads these."""
    bundled = TargetStage.model_fields["model"].default
    drafts = [recipe.draft, *(recipe.draft.candidates or ())]
    models = [name for name in (recipe.target.model, *(draft.model for draft in drafts)) if name is not None]
    traffic = [*sources(recipe.traffic.train), *sources(recipe.traffic.heldout)]
    local = all(name == bundled or os.path.exists(os.path.expanduser(name)) for name in models)
    if local and all(name == "bundled" or paths(name) for name in traffic):
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def _quiet() -> None:
    """Keeps the libraries' progress bars, tips and advice about loaders out of the log."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lightning.pytorch  # noqa: F401 - it sets its own level when it is first imported

    warnings.filterwarnings("ignore", module=r"lightning\..*")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "httpx", "httpx2", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _tokenizer_class(folder: str) -> str | None:
    """The class that the target's own files name."""
    path = Path(folder) / "tokenizer_config.json"
    return json.loads(path.read_text()).get("tokenizer_class") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
