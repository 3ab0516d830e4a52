"""Experiment tracking: the only importer of wandb, and a tracker that does nothing beside it.

Offline by default: W&B then writes a folder that `wandb sync` uploads later, and nothing touches the network.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.schema import Track

log = logging.getLogger(__name__)

Scalar = float | int | str | bool | None


class TrackError(ValueError):
    """The tracker could not be started."""


class NullTracker:
    """Takes everything and keeps nothing (`track.mode=disabled`)."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Records values at an optimizer step."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets the run's final figures."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]]) -> None:
        """Records a table at an optimizer step."""

    def figure(self, step: int, name: str, path: Path) -> None:
        """Records a figure file (png, jpg or svg) at an optimizer step."""

    def artifact(self, name: str, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Records a folder as a model artifact."""

    def finish(self, exit_code: int) -> None:
        """Closes the run; it counts as finished only when `exit_code` is 0."""


class Tracker(NullTracker):
    """A W&B run with its own step axis.

    W&B's internal step must never go back, but a resumed run repeats steps and a validation may be logged after later
    training rows. So `step` is an ordinary value that every chart uses as its axis, and no row is ever dropped.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Records values at an optimizer step."""
        self._run.log({"step": step, **values})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets the run's final figures."""
        self._run.summary.update(dict(values))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Scalar]]) -> None:
        """Records a table at an optimizer step."""
        import wandb

        self._run.log({"step": step, name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def figure(self, step: int, name: str, path: Path) -> None:
        """Records a figure file (png, jpg or svg) at an optimizer step."""
        import wandb

        # W&B images are bitmaps; a vector figure goes in as a page.
        media = wandb.Html(path.read_text(), inject=False) if path.suffix == ".svg" else wandb.Image(str(path))
        self._run.log({"step": step, name: media})

    def artifact(self, name: str, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Records a folder as a model artifact; the files stay where they are."""
        import wandb

        artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
        # "immutable" names the files in place; the default copies the whole draft into a cache folder.
        artifact.add_dir(str(folder), policy="immutable")
        self._run.log_artifact(artifact)

    def finish(self, exit_code: int) -> None:
        """Closes the run; it counts as finished only when `exit_code` is 0."""
        import wandb

        self._run.finish(exit_code=exit_code)
        # `finish` returns before W&B's own process has written its file; this waits for that process to end.
        wandb.teardown(exit_code)


def start(
    track: Track,
    folder: Path,
    run_id: str,
    config: Mapping[str, Any],
    attempt: int = 0,
) -> NullTracker:
    """Starts tracking a run, with its whole config from the first moment.

    Args:
        track: the recipe's track stage.
        folder: run folder; W&B writes below `folder/wandb`.
        run_id: name of the run.
        config: nested values: resolved recipe, provenance, model names.
        attempt: 0 for a fresh run, n for its n-th resumption, which becomes a W&B run of its own in the same group.

    Returns:
        A tracker; one that does nothing when `track.mode` is "disabled".

    Raises:
        TrackError: W&B refused to start, for example online without a key.
    """
    if track.mode == "disabled":
        return NullTracker()
    if track.mode == "offline":
        # Both are read when wandb is imported: its crash reporter would call home even in an offline run.
        os.environ.update(WANDB_MODE="offline", WANDB_ERROR_REPORTING="false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
    try:
        run = wandb.init(
            mode=track.mode,
            project=track.project,
            entity=track.entity,
            name=run_id if attempt == 0 else f"{run_id}-resume{attempt}",
            group=run_id,
            tags=list(track.tags),
            config={**config, "attempt": attempt},
            dir=str(folder),
            reinit="create_new",
            settings=settings,
        )
    except wandb.errors.Error as error:
        raise TrackError(
            f"track.mode={track.mode}: W&B did not start ({error}). Log in with `wandb login`, or use "
            "track.mode=offline (upload later with `wandb sync`) or track.mode=disabled."
        ) from error
    log.info("W&B %s run in %s", track.mode, run.dir)
    return Tracker(run)
