"""The recipe's `distill.replay` stage: training on what verification of the draft's own proposals computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from distill.fields import Length, Positive, Stage, Temperature


class Replay(Stage):
    """The last steps train on the draft's own proposals to training prompts, as the target judged them.

    Attributes:
        frac: share of the optimizer steps, the last ones.
        num_prompts: training prompts that draft and target answer together, drawn by the seed; at most all.
        k: proposals a cycle.
        temperature: of the target and of the draft; null is eval.temperature.
    """

    frac: Annotated[float, Field(gt=0, lt=1)] = 0.25
    num_prompts: Positive = 256
    k: Length = 4
    temperature: Temperature | None = None


def replay_start(max_steps: int, frac: float) -> int:
    """Optimizer steps before the stage; at least one is the stage's."""
    return max_steps - max(1, round(frac * max_steps))


def start_clashes(stage: Replay, max_steps: int, before: int) -> Iterator[tuple[str, str]]:
    """What of the recipe does not go with the stage.

    Args:
        stage: the stage.
        max_steps: of the draft itself.
        before: steps that must come before it.
    """
    start = replay_start(max_steps, stage.frac)
    if start < before:
        yield (
            "distill.replay.frac",
            f"= {stage.frac:g} starts after step {start}, but warm-up, race and one step at least come before it "
            f"({before} steps); lower it",
        )
