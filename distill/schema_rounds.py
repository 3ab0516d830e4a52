"""The recipe's `draft.rounds`: shapes between the target and the draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from distill.fields import Count, Positive, Stage, increasing


class Round(Stage):
    """One shape on the way: cut from what the round before left, then distilled for a share of the steps.

    Attributes:
        frac: share of distill.max_steps; the draft itself gets what all rounds leave.
        layers: the target's layers to keep, of those that the round before kept.
        num_layers, choose: keep so many of those, by the rules of the draft stage; without either all are kept.
        hidden_size, intermediate_size, num_kv_heads: null keeps what there is.
    """

    frac: Annotated[float, Field(gt=0, lt=1)]
    layers: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(increasing)] | None = None
    num_layers: Positive | None = None
    choose: Literal["spaced", "ends", "influence"] = "spaced"
    hidden_size: Positive | None = None
    intermediate_size: Positive | None = None
    num_kv_heads: Positive | None = None

    def clashes(self) -> Iterator[tuple[str, str]]:
        if self.layers is not None and self.num_layers is not None:
            yield "num_layers", f"= {self.num_layers} is given beside layers; drop one of the two"
        if self.num_layers is None and self.choose != "spaced":
            yield "choose", f"= {self.choose} chooses num_layers layers; give num_layers, or drop it"


def round_steps(rounds: Sequence[Round], max_steps: int) -> list[int]:
    """Optimizer steps of each round, and last those of the draft itself."""
    steps = [max(1, round(one.frac * max_steps)) for one in rounds]
    return [*steps, max_steps - sum(steps)]


def step_clashes(steps: Sequence[int], warmup: int) -> Iterator[tuple[str, str]]:
    """What of the recipe does not go with so many steps of each round (the draft's own are the last); nothing if alone.

    Args:
        steps: see `round_steps`.
        warmup: steps of warm-up, which every round has.
    """
    if len(steps) > 1 and min(steps) <= warmup:
        yield (
            "draft.rounds",
            f"take {', '.join(map(str, steps[:-1]))} of distill.max_steps = {sum(steps)} and leave {steps[-1]} for the "
            f"draft itself; each must be above distill.warmup_steps = {warmup}",
        )


def order_clashes(rounds: Sequence[Round], layers: Sequence[int] | None) -> Iterator[tuple[str, str]]:
    """What is wrong with layers that are named one round after another.

    Args:
        rounds: in order.
        layers: that the draft itself names, or None.
    """
    held: Sequence[int] | None = None  # None: all
    chosen = None
    named = [(f"rounds[{number}].layers", one) for number, one in enumerate(rounds)]
    for key, kept, num in [*((key, one.layers, one.num_layers) for key, one in named), ("layers", layers, None)]:
        if kept is not None and chosen is not None:
            yield key, f"= {list(kept)}, but {chosen} leaves the choice open; name layers there too, or num_layers here"
        elif kept is not None and held is not None and (lost := sorted({*kept} - {*held})):
            yield key, f"= {list(kept)}: layers {lost} are gone since the round before, which keeps {list(held)}"
        if num is not None:
            chosen = key.replace(".layers", ".num_layers")
        held = held if kept is None else kept
