"""The training loop's surroundings: Lightning's Trainer, its processes, and the progress bar."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader

from distill.keeper import Keeper
from distill.module import DraftModule
from distill.recipe import Recipe
from distill.runs import RUN_ATTEMPT, RUN_FOLDER, Run, RunError, Stop, is_whole, rank
from distill.teacher import BatchPlan, ResponseDataset, Windows
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

    Returns:
        The best validation: `step`, `val/speedup`, `val/best_k`, and each domain's figures.

    Raises:
        Interrupted: a signal arrived; the checkpoint is written.
        TrainingDiverged: a loss that is not finite.
        RunError: the best checkpoint is broken.
    """
    stage = recipe.distill
    end = stage.max_steps if until is None else until
    start = 0 if resume_from is None else checkpoint_step(resume_from)
    plan = BatchPlan(dataset.lengths, stage.tokens_per_step, recipe.seed)
    num_batches = len(plan.epoch(0))
    if stage.accumulate > num_batches:
        log.warning(
            "distill.accumulate = %d is more than the %d micro-batches of an epoch: a step sees an answer up to %d "
            "times; its effective batch is about %d supervised tokens",
            stage.accumulate,
            num_batches,
            -(-stage.accumulate // num_batches),
            sum(dataset.num_supervised) * stage.accumulate // num_batches,
        )
    windows = Windows(dataset, plan, stage.accumulate, start, rank(), recipe.trainer.devices)
    # A generator of its own: the loader draws a number when it starts, which would set a resumed run apart.
    pinned = torch.cuda.is_available() and recipe.trainer.accelerator != "cpu"
    loader = DataLoader(windows, batch_size=None, generator=torch.Generator(), pin_memory=pinned)
    bar = sys.stderr.isatty() and sys.stdout.isatty() and recipe.trainer.devices == 1
    keeper = Keeper(recipe, run, stop, tracker, validation, not bar, end)
    trainer = pl.Trainer(
        max_steps=end,
        max_epochs=-1,
        accelerator=recipe.trainer.accelerator,
        devices=recipe.trainer.devices,
        strategy=_strategy(recipe),
        precision=recipe.trainer.precision,
        callbacks=[keeper, Bar()] if bar else [keeper],
        enable_progress_bar=bar,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=run.folder,
    )
    with _others_told(recipe, run):
        trainer.fit(module, loader, ckpt_path=resume_from, weights_only=True)
    assert trainer.global_step == max(start, end), (trainer.global_step, end)
    if not trainer.is_global_zero:
        return keeper.best
    if not is_whole(run.best):
        raise RunError(f"{run.best} is missing or damaged: resume with a larger distill.max_steps to make a new one")
    module.load_state_dict(torch.load(run.best, weights_only=True)["state_dict"])
    if keeper.start and end == stage.max_steps:
        told = moved(keeper.start, keeper.best, recipe.traffic.domain)
        (log.info if told[0] else log.warning)("%s", told[1])
    return keeper.best


def moved(start: Mapping[str, Any], best: Mapping[str, Any], domain: str) -> tuple[bool, str]:
    """Did tuning move the measured acceptance of a draft that existed before?

    Args:
        start, best: validations before the first step and of the kept weights, on the same answers.
        domain: trained for; all of them where it is not among them.

    Returns:
        Whether any domain gained more than two standard errors (of one share over that many tokens, as if they were
        independent: too small an error for runs of alike tokens, too large a one for paired shares), and a sentence.
    """
    names = sorted({key.split("/")[1] for key in start if key.count("/") == 2})
    lines, better = [], False
    for name in [domain] if domain in names else names:
        key = f"val/{name}/alpha"
        before, after, num = start[key], best[key], start[f"val/{name}/num_tok"]
        error = math.sqrt(max(before * (1 - before), after * (1 - after)) / num)
        better |= after - before > 2 * error
        lines.append(f"{name} {before:.3f} -> {after:.3f} (standard error {error:.3f} over {num:.0f} tokens)")
    text = f"acceptance on held-out answers: {', '.join(lines)}"
    if better:
        return True, text
    return False, (
        f"{text}: it did not move beyond chance, so tuning gained nothing that was measured. Give it more answers or "
        "steps, another distill.lr or draft.lora.rank, or keep the draft as it was"
    )


def _strategy(recipe: Recipe) -> str | Strategy:
    """One process, or several of which each has its own copy of the draft (data parallel).

    Lightning starts them from the first, by this program's own command line; they find the run by the environment.
    """
    if recipe.trainer.devices == 1:
        return recipe.trainer.strategy
    # The module adds up gradients itself, and its one buffer of size, the target's head, never changes.
    return DDPStrategy(cluster_environment=LightningEnvironment(), broadcast_buffers=False)


@contextmanager
def _others_told(recipe: Recipe, run: Run) -> Iterator[None]:
    """While it lasts, processes that are started from this one know its run."""
    told = {} if recipe.trainer.devices == 1 or rank() else {RUN_FOLDER: str(run.folder.absolute())}
    told |= {RUN_ATTEMPT: str(run.attempt)} if told else {}
    os.environ |= told
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def checkpoint_step(path: Path) -> int:
    """Optimizer steps taken when a checkpoint was written."""
    return int(torch.load(path, weights_only=True, mmap=True)["global_step"])
