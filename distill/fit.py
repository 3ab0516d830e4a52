"""The training loop's surroundings: Lightning's Trainer, its processes, and the progress bar."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader

from distill.batches import BatchPlan, Windows
from distill.keeper import Keeper, Matches, Writer
from distill.launch import ALONE, PATIENCE, Place, others_told
from distill.module import DraftModule
from distill.recipe import Recipe
from distill.runs import Run, RunError, Stop, is_whole
from distill.teacher import ResponseDataset
from distill.track import NullTracker
from distill.validation import Validation

log = logging.getLogger(__name__)


class Bar(RichProgressBar):
    """Lightning's bar, over the steps of the whole run, with the figures of the last step."""

    @property
    def total_train_batches(self) -> int | float:
        """Optimizer steps of the run: the loader itself has no end."""
        return self.trainer.max_steps

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, int | str | float]:
        """Loss, acceptance on the training rows, and supervised tokens per second (steps per second stand beside)."""
        assert isinstance(pl_module, DraftModule)
        return {name: round(pl_module.taken.get(name, 0.0), 3) for name in ("loss", "alpha", "tok_per_s")}


def fit(
    recipe: Recipe,
    run: Run,
    module: DraftModule,
    dataset: ResponseDataset,
    validation: Validation,
    stop: Stop,
    tracker: NullTracker,
    resume_from: Path | None = None,
    until: int | None = None,
    place: Place = ALONE,
) -> dict[str, Any]:
    """Trains to `distill.max_steps` or a step before it, and leaves the best weights in `module`.

    Args:
        recipe: the resolved recipe.
        run: gets checkpoints and train.jsonl.
        module: the draft to train.
        dataset: the target's answers.
        validation: held-out answers.
        stop: signals; `Interrupted` is raised after the step's checkpoint.
        tracker: gets every row.
        resume_from: a whole training checkpoint; None starts at step 0.
        until: the step to stop at; the learning rate is that of the whole run all the same.
        place: this process among those of the run.

    Returns:
        The best validation: `step`, `val/speedup`, `val/best_k`, and each domain's figures; at the end of the run of a
        draft that existed before also `tuned/...` (`moved`).

    Raises:
        Interrupted: a signal arrived; the checkpoint is written.
        TrainingDiverged: a loss that is not finite.
        RunError: the best checkpoint is broken.
        OSError: the disk is full, or another process of the run died.
    """
    stage, num_processes = recipe.distill, recipe.trainer.num_processes
    end = stage.max_steps if until is None else until
    start = 0 if resume_from is None else checkpoint_step(resume_from)
    plan = BatchPlan(dataset.lengths, stage.tokens_per_step, recipe.seed, stage.packing)
    num_batches = len(plan.epoch(0))
    window = stage.accumulate * num_processes
    if window > num_batches:
        log.warning(
            "distill.accumulate = %d%s is more than the %d micro-batches of an epoch: a step sees an answer up to %d "
            "times; its effective batch is about %d supervised tokens",
            stage.accumulate,
            f" on {num_processes} processes" if num_processes > 1 else "",
            num_batches,
            -(-window // num_batches),
            sum(dataset.num_supervised) * window // num_batches,
        )
    windows = Windows(dataset, plan, stage.accumulate, start, place.rank, num_processes)
    # A generator of its own: the loader draws a number when it starts, which would set a resumed run apart.
    pinned = torch.cuda.is_available() and recipe.trainer.accelerator != "cpu"
    loader = DataLoader(windows, batch_size=None, generator=torch.Generator(), pin_memory=pinned)
    bar = sys.stderr.isatty() and sys.stdout.isatty() and num_processes == 1
    writer = Writer()
    keeper = Keeper(recipe, run, stop, tracker, validation, not bar, end, writer)
    trainer = pl.Trainer(
        max_steps=end,
        max_epochs=-1,
        accelerator=recipe.trainer.accelerator,
        devices=recipe.trainer.devices,
        num_nodes=recipe.trainer.num_nodes,
        strategy=_strategy(recipe),
        plugins=[writer, *_environment(recipe, place)],
        precision=recipe.trainer.precision,
        callbacks=[keeper, Bar()] if bar else [keeper],
        enable_progress_bar=bar,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=run.folder,
    )
    with others_told(run, num_processes, place):
        try:
            trainer.fit(module, loader, ckpt_path=resume_from, weights_only=True)
        except RuntimeError as error:
            if num_processes > 1 and (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
                raise OSError(f"another process of the run is gone: {error}") from error
            raise
    assert trainer.global_step == max(start, end), (trainer.global_step, end)
    if not trainer.is_global_zero:
        return keeper.best
    module.gather()
    if not is_whole(run.best):
        raise RunError(f"{run.best} is missing or damaged: resume with a larger distill.max_steps to make a new one")
    module.load_state_dict(torch.load(run.best, weights_only=True)["state_dict"])
    if "start" not in keeper.matches or end < stage.max_steps:
        return keeper.best
    matches, kept = keeper.matches, int(keeper.best["step"])
    told = moved(matches["start"], matches["best"], recipe.traffic.domain, recipe.seed, kept)
    (log.info if told.better else log.warning)("%s", told.text)
    return keeper.best | told.figures


class Moved(NamedTuple):
    """Whether tuning moved the acceptance of a draft that existed before.

    Attributes:
        better: in a domain the interval of the change lies above 0.
        text: for the log.
        figures: for the draft's summary: `tuned/moved`, and by domain `from`, `to`, and `low`, `high` of the change.
    """

    better: bool
    text: str
    figures: dict[str, float | bool]


def moved(start: Matches, best: Matches, domain: str, seed: int = 0, kept: int = 1) -> Moved:
    """Did tuning move the measured acceptance of a draft that existed before?

    Args:
        start, best: matching and all positions of each held-out answer, before the first step and with the kept
            weights, by domain; the same answers in the same order.
        domain: trained for; all of them where it is not among them.
        seed: of the 2000 resamples of answers, both validations of an answer together, for the 95% interval.
        kept: step of the kept weights; 0 is the draft as it came.
    """
    figures: dict[str, float | bool] = {}
    lines, better, worse = [], False, False
    for name in [domain] if domain in start else sorted(start):
        before, after = np.array(start[name], float), np.array(best[name], float)
        num, change = len(before), after[:, 0] - before[:, 0]
        index = np.random.default_rng(seed).integers(0, num, size=(2000, num))
        low, high = np.percentile(change[index].sum(1) / before[index, 1].sum(1), [2.5, 97.5]).tolist()
        one, two = (float(x[:, 0].sum() / x[:, 1].sum()) for x in (before, after))
        better |= num > 1 and low > 0
        worse |= num > 1 and high < 0
        lines.append(f"{name} {one:.3f} -> {two:.3f} (change {low:+.3f} to {high:+.3f} over {num} answers)")
        figures |= {f"tuned/{name}/{key}": x for key, x in zip(("from", "to", "low", "high"), (one, two, low, high))}
    text = f"acceptance on held-out answers: {', '.join(lines)}"
    if kept == 0:
        text = (
            "no validation of this tuning promised more speed than the draft as it came, which is what draft/ holds. "
            "Try a lower distill.lr, or more answers"
        )
    elif worse and not better:
        text += (
            ": it fell, and the predicted speedup alone rose; look at val/ in train.jsonl before you serve this draft"
        )
    elif not better:
        text += (
            ": it did not move beyond chance, so tuning gained nothing that was measured. Give it more answers or "
            "steps, another distill.lr or draft.lora.rank, or keep the draft as it was"
        )
    return Moved(better, text, {"tuned/moved": better, **figures})


def _strategy(recipe: Recipe) -> str | Strategy:
    """One process; or several, of which each has its own copy of the draft, or a part of it."""
    num = recipe.trainer.num_processes
    if num == 1:
        return "auto"
    if recipe.trainer.strategy == "fsdp":
        # One whole file, written by the first process.
        return ModelParallelStrategy(num, 1, save_distributed_checkpoint=False, timeout=PATIENCE)
    # The module adds up gradients itself, and its one buffer of size, the target's head, never changes.
    return DDPStrategy(broadcast_buffers=False, timeout=PATIENCE)


def _environment(recipe: Recipe, place: Place) -> list[ClusterEnvironment]:
    """Tells Lightning who starts the processes, so that it does not guess."""
    if recipe.trainer.num_processes == 1:
        return []
    return [TorchElasticEnvironment() if place.launched else LightningEnvironment()]


def checkpoint_step(path: Path) -> int:
    """Optimizer steps taken when a checkpoint was written.

    Raises:
        RunError: it is no training checkpoint, or holds more than data.
    """
    try:
        return int(torch.load(path, weights_only=True, mmap=True)["global_step"])
    except (UnpicklingError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"{path}: no training checkpoint ({reason}); remove it to go on from an older one") from error
