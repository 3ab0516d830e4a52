"""The training loop's surroundings: Lightning's Trainer, what happens after each step, and the progress bar.

In a run of several processes all of them take every step and decision together; the first alone writes and validates.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader

from distill import ranks
from distill.module import DraftModule
from distill.recipe import Recipe
from distill.runs import RUN_ATTEMPT, RUN_FOLDER, Run, RunError, Stop, is_whole, rank
from distill.teacher import BatchPlan, ResponseDataset, Windows
from distill.track import NullTracker
from distill.validation import Validation, choose, flat, table

log = logging.getLogger(__name__)

ESTIMATE_AFTER = 20  # steps; the first ones warm caches up
LINE_EVERY_S = 10.0


class Keeper(pl.Callback):
    """After every optimizer step: log, validate, keep the best, save, and stop when asked to.

    All of it in this order and in one place, so that a checkpoint holds what its own step's validation found and a
    resumed run repeats nothing and leaves nothing out.

    Args:
        recipe: the resolved recipe.
        run: gets train.jsonl and the checkpoints.
        stop: tells whether a signal has arrived.
        tracker: gets every row too.
        validation: held-out answers.
        lines: write a line to the log now and then (no progress bar is shown).
        end: the step to stop at.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        stop: Stop,
        tracker: NullTracker,
        validation: Validation,
        lines: bool,
        end: int,
    ) -> None:
        self.end = end
        self.recipe, self.run, self.stop, self.tracker, self.validation = recipe, run, stop, tracker, validation
        self.lines = lines
        self.start: dict[str, Any] = {}
        self.best: dict[str, Any] = {}
        self.tok_seen = 0
        self._first = self._line_step = 0
        self._started = self._clock = self._line_at = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: the first and the best validation so far and the tokens seen."""
        return {"start": self.start, "best": self.best, "tok_seen": self.tok_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.start, self.best, self.tok_seen = (state_dict[name] for name in ("start", "best", "tok_seen"))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the signals over from Lightning, whose own handling would stop without saving.

        A draft that existed before is validated as it came: tuning has to beat that, or it is what is kept.
        """
        self.stop.install()
        if self.recipe.draft.kind == "pretrained" and trainer.global_step == 0:
            assert isinstance(pl_module, DraftModule)
            self._validate(trainer, pl_module)
            self.start = self.best
        self.stop.deferred = True
        self._first = self._line_step = trainer.global_step
        self._started = self._clock = self._line_at = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Everything that follows an optimizer step."""
        assert isinstance(pl_module, DraftModule)
        stage, step = self.recipe.distill, trainer.global_step
        last = step >= self.end
        self._log(step, pl_module)
        if step % stage.validate_every == 0 or last:
            self._validate(trainer, pl_module)
        # A signal may have reached one process only.
        self.stop.signum = ranks.largest(self.stop.signum or 0, pl_module.device) or None
        if step % stage.checkpoint_every == 0 or last or self.stop.signum is not None:
            self._save(trainer, best=False)
        self.stop.check()
        self._clock = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on a signal may interrupt at once."""
        self.stop.deferred = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As at the end of training."""
        self.stop.deferred = False

    def _save(self, trainer: pl.Trainer, best: bool) -> None:
        """A checkpoint by the first process; the others only wait for it."""
        if not trainer.is_global_zero:
            trainer.save_checkpoint(self.run.last, weights_only=best)  # writes nothing here
        elif best:
            self.run.save_best(lambda path: trainer.save_checkpoint(path, weights_only=True))
        else:
            self.run.save_last(lambda path: trainer.save_checkpoint(path, weights_only=False))

    def _log(self, step: int, module: DraftModule) -> None:
        now = time.perf_counter()
        self.tok_seen += int(module.taken["num_tok"])
        seconds = now - self._clock
        module.taken |= {
            "step_ms": 1e3 * seconds,
            "tok_per_s": module.taken["num_tok"] / seconds,
            "tok_seen": self.tok_seen,
        }
        if not module.trainer.is_global_zero:
            return
        self.run.append({"step": step, **module.taken})
        self.tracker.log(step, {f"train/{name}": value for name, value in module.taken.items()})
        done, left = step - self._first, self.end - step
        if done == ESTIMATE_AFTER and left > 0:
            log.info("about %.1f minutes of training left, validation not counted", left * self._pace(now, done) / 60)
        if self.lines and now - self._line_at >= LINE_EVERY_S:
            self._line_at, self._line_step = now, step
            log.info(
                "step %d/%d: loss %.4f, alpha %.3f, lr %.2e, %.0f supervised tok/s, %.2f steps/s",
                step,
                self.end,
                *(module.taken[name] for name in ("loss", "alpha", "lr", "tok_per_s")),
                1 / seconds,
            )

    def _pace(self, now: float, done: int) -> float:
        return (now - self._started) / done

    def _validate(self, trainer: pl.Trainer, module: DraftModule) -> None:
        values = self._score(trainer, module) if trainer.is_global_zero else None
        values = trainer.strategy.broadcast(values)
        assert values is not None
        if not self.best or values["val/speedup"] > self.best["val/speedup"]:
            self.best = values
            self._save(trainer, best=True)

    def _score(self, trainer: pl.Trainer, module: DraftModule) -> dict[str, Any]:
        """Scores the draft on all held-out answers and logs it."""
        step, started = trainer.global_step, time.perf_counter()
        scores = module.validate(self.validation)
        k, speedup = choose(scores, self.recipe.traffic.domain)
        values = {"step": step, "val/speedup": speedup, "val/best_k": k, **flat(scores)}
        better = not self.best or speedup > self.best["val/speedup"]
        log.info("validation at step %d (%.1f s)\n%s", step, time.perf_counter() - started, table(scores))
        log.info(
            "predicted end-to-end speedup %.3fx at k=%d%s",
            speedup,
            k,
            ": the best so far" if better else f"; best is {self.best['val/speedup']:.3f}x at step {self.best['step']}",
        )
        self.run.append(values)
        self.tracker.log(step, {name: value for name, value in values.items() if name != "step"})
        columns = ("domain", "alpha", "alpha_whole", "overlap", "overlap_whole", "best_k", "speedup")
        rows: list[list[float | str]] = [
            [s.domain, s.alpha, s.alpha_whole, s.overlap, s.overlap_whole, s.best[0], s.best[1]] for s in scores
        ]
        self.tracker.table(step, "val/domains", columns, rows)
        return values


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
    """Optimizer steps taken when a checkpoint was written.

    Raises:
        RunError: it is no training checkpoint, or holds more than data.
    """
    try:
        return int(torch.load(path, weights_only=True, mmap=True)["global_step"])
    except (UnpicklingError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"{path}: no training checkpoint ({reason}); remove it to go on from an older one") from error
