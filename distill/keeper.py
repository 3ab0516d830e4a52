"""What happens after each optimizer step: log, validate, keep the best, save, and stop when asked to.

In a run of several processes all of them take every decision together; the first alone writes, and alone validates
unless each holds only a part of the draft.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from distill import ranks
from distill.module import DraftModule
from distill.recipe import Recipe
from distill.runs import Run, RunError, Stop
from distill.track import NullTracker
from distill.validation import Validation, choose, flat, table

log = logging.getLogger(__name__)

Matches = dict[str, list[tuple[float, int]]]

ESTIMATE_AFTER = 20  # steps; the first ones warm caches up
LINE_EVERY_S = 10.0
FAILED = 1_000  # no signal has this number


class Writer(TorchCheckpointIO):
    """Writes a checkpoint straight into its file; Lightning's own takes it into memory and through /tmp first.

    An error is kept until `check`: Lightning lets all processes meet after a save, and the first must come too.
    """

    def __init__(self) -> None:
        self._error: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes; called in the first process alone."""
        self._error = None
        try:
            torch.save(checkpoint, path)
        except OSError as error:
            self._error = error
        except RuntimeError as error:  # torch's writer has no other, and does not say why
            folder = Path(path).parent
            free = shutil.disk_usage(folder).free
            self._error = OSError(
                f"{folder}: the checkpoint could not be written whole, and {free / 1e6:.1f} MB are free; the older one "
                f"is kept; make room ({error})"
            )

    def check(self) -> None:
        """Raises the error of the last save."""
        if self._error is not None:
            raise self._error


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
        writer: of the trainer's checkpoints.
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
        writer: Writer,
    ) -> None:
        self.end, self.writer = end, writer
        self._failed: OSError | RunError | None = None
        self.recipe, self.run, self.stop, self.tracker, self.validation = recipe, run, stop, tracker, validation
        self.lines = lines
        self.best: dict[str, Any] = {}
        # Matches of each held-out answer by domain, at the first and the best validation: too long for the log.
        self.matches: dict[str, Matches] = {}
        self.tok_seen = 0
        self._first = self._line_step = 0
        self._started = self._clock = self._line_at = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: the best validation so far, its and the first's matches, the tokens seen."""
        return {"best": self.best, "tok_seen": self.tok_seen, "matches": self.matches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.best, self.tok_seen = state_dict["best"], state_dict["tok_seen"]
        self.matches = state_dict.get("matches", {})  # checkpoints from before they were kept have none

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the signals over from Lightning, whose own handling would stop without saving.

        A draft that existed before is validated as it came: tuning has to beat that, or it is what is kept.
        """
        self.stop.install()
        if self.recipe.draft.kind == "pretrained" and trainer.global_step == 0:
            assert isinstance(pl_module, DraftModule)
            self.matches["start"] = self._validate(trainer, pl_module)
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
        # A signal may have reached one process only, and the disk is the first one's.
        found = ranks.largest(FAILED if self._failed else self.stop.signum or 0, pl_module.device)
        if found == FAILED:
            raise self._failed or ranks.FirstFailed
        if step % stage.checkpoint_every == 0 or last or found:
            self._save(trainer, best=False)
        self.stop.check(found)  # a signal that came since then is not known to all: it is the next step's
        self._clock = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on a signal may interrupt at once."""
        self.stop.deferred = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As at the end of training."""
        self.stop.deferred = False

    def _save(self, trainer: pl.Trainer, best: bool) -> None:
        """A checkpoint by the first process; the others give their part of it, if they have one, and wait.

        Raises:
            OSError, RunError: it could not be written; `FirstFailed` in the others.
        """

        def save(path: Path) -> None:
            trainer.save_checkpoint(path, weights_only=best)
            self.writer.check()

        if trainer.is_global_zero:
            try:
                (self.run.save_best if best else self.run.save_last)(save)
            except (OSError, RunError) as error:
                self._failed = error
        else:
            trainer.save_checkpoint(self.run.last, weights_only=best)  # writes nothing here
        if trainer.strategy.broadcast(self._failed is not None):
            raise self._failed or ranks.FirstFailed

    def _append(self, row: dict[str, Any]) -> None:
        """Adds a row to train.jsonl; a failure waits until the processes meet."""
        try:
            self.run.append(row)
        except OSError as error:
            self._failed = error

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
        self._append({"step": step, **module.taken})
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

    def _validate(self, trainer: pl.Trainer, module: DraftModule) -> Matches:
        """Validates, keeps the draft if it is the best so far, and gives the matches of each answer."""
        found = self._score(trainer, module) if trainer.is_global_zero or module.sharded else None
        found = trainer.strategy.broadcast(found)
        assert found is not None
        values, matches = found
        if not self.best or values["val/speedup"] > self.best["val/speedup"]:
            self.best, self.matches["best"] = values, matches
            self._save(trainer, best=True)
        return matches

    def _score(self, trainer: pl.Trainer, module: DraftModule) -> tuple[dict[str, Any], Matches]:
        """Scores the draft on all held-out answers and logs it."""
        step, started = trainer.global_step, time.perf_counter()
        scores = module.validate(self.validation)
        k, speedup = choose(scores, self.recipe.traffic.domain)
        values = {"step": step, "val/speedup": speedup, "val/best_k": k, **flat(scores)}
        matches = {score.domain: score.matches for score in scores}
        if not trainer.is_global_zero:
            return values, matches
        better = not self.best or speedup > self.best["val/speedup"]
        log.info("validation at step %d (%.1f s)\n%s", step, time.perf_counter() - started, table(scores))
        log.info(
            "predicted end-to-end speedup %.3fx at k=%d%s",
            speedup,
            k,
            ": the best so far" if better else f"; best is {self.best['val/speedup']:.3f}x at step {self.best['step']}",
        )
        self._append(values)
        self.tracker.log(step, {name: value for name, value in values.items() if name != "step"})
        columns = ("domain", "alpha", "alpha_whole", "overlap", "overlap_whole", "best_k", "speedup")
        rows: list[list[float | str]] = [
            [s.domain, s.alpha, s.alpha_whole, s.overlap, s.overlap_whole, s.best[0], s.best[1]] for s in scores
        ]
        self.tracker.table(step, "val/domains", columns, rows)
        return values, matches
