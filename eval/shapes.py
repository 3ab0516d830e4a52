"""Which shapes race: what a target can be cut to within the recipe's bounds, and which of these by cost. No torch.

At one acceptance for all of them the ranking is one of cost alone, in which the least shape always wins; a larger draft
accepts more, by how much only training tells. So cost ranks, and the choice sees to it that what races differs: of each
depth (serial time) the widest shape that is hardly slower than the fastest one, since width is mostly bytes, and then
the best of what is left that is not all but the same. Beside them stand the recipe's own shape and a control.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.control import CONTROL
from distill.counts import count, kv_heads
from distill.known import PRE_NORM
from distill.look import cut_config
from distill.recipe import Draft, Head, Recipe
from engine.costs import Costs, predicted_speedup

MOST_LAYERS = 6
FFN_PARTS = (1.0, 3 / 4, 1 / 2, 1 / 3, 1 / 4, 1 / 6)  # of the target's width
CONTROL_PARTS = (*FFN_PARTS, 1 / 8, 1 / 16)
ALIKE = 1.25  # sizes nearer than this are one shape
HARDLY = 0.03  # speed that a wider shape of the same depth may cost
FIELD = 5  # shapes in a race, beside the control


@dataclass(frozen=True)
class Shape:
    """A draft that may race.

    Attributes:
        draft: its stage.
        config: content of its config.json.
        stored_frac, read_frac: of the target's parameters.
        own: the recipe's own.
    """

    draft: Draft
    config: Mapping[str, Any]
    stored_frac: float
    read_frac: float
    own: bool = False

    @property
    def depth(self) -> int:
        """Layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def frac(self) -> float:
        """Share of the target by the count that its bounds are in."""
        return self.stored_frac if self.draft.size_count == "stored" else self.read_frac

    @property
    def fits(self) -> bool:
        """Is it within its own bounds?"""
        low, high = self.draft.size_frac
        return low <= self.frac <= high


@dataclass(frozen=True)
class Ranked:
    """A shape with what it costs: `speedup` at the assumed acceptance, with the best of the ks, and that k."""

    shape: Shape
    costs: Costs
    k: int
    speedup: float


def shape_of(draft: Draft, target: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Shape | None:
    """A draft with its sizes, or None where it can not be cut from this target.

    Args:
        draft: its stage.
        target: content of the target's config.json.
        config: the draft's, of a pretrained one.
    """
    found = config if config is not None else cut_config("draft", draft, target, [])
    if found is None or (draft.head.size or 0) > found["vocab_size"] or (draft.head.rank or 0) > found["hidden_size"]:
        return None
    sizes, whole = count(found, draft.head.size, draft.head.rank), count(target)
    return Shape(draft, found, sizes[0] / whole[0], sizes[1] / whole[1])


def shapes_within(recipe: Recipe, target: Mapping[str, Any]) -> list[Shape]:
    """Shapes of 1 to 6 layers within the recipe's bounds, by depth, head and size apart from each other.

    Args:
        recipe: its draft says how layers are chosen, which head comes first, other widths and the bounds.
        target: content of the target's config.json.
    """
    found: list[Shape] = []
    for depth in range(1, min(MOST_LAYERS, target["num_hidden_layers"]) + 1):
        for head in heads(recipe, target):
            for width in sorted(_widths(recipe, target, FFN_PARTS), reverse=True):
                shape = shape_of(_cut(recipe, target, depth, width, head), target)
                if shape is not None and shape.fits and not any(_alike(shape, one, head=True) for one in found):
                    found.append(shape)
    return found


def heads(recipe: Recipe, target: Mapping[str, Any]) -> list[Head]:
    """The recipe's own head, half and twice of it, and one of the other kind that reads as much.

    A shortlist does not go with a top-k teacher, a low-rank head not with LoRA.
    """
    own, rows, width = recipe.draft.head, target["vocab_size"], recipe.draft.hidden_size or target["hidden_size"]
    # rows x width of a shortlist, rank x (rows + width) of factors; a sixth of the head where it is whole.
    size = own.size or min(rows, _even((own.rank or 0) * (rows + width) / width, 1024)) or _even(rows / 6, 1024)
    rank = own.rank or min(width, _even(size * width / (rows + width), 8))
    found = [own]
    if own.kind != "low_rank":
        found += [Head(kind="shortlist", size=n) for n in (size, size // 2, 2 * size) if 1 <= n <= rows]
        found += [Head(kind="low_rank", rank=rank)]
    else:
        found += [Head(kind="low_rank", rank=n) for n in (rank // 2, 2 * rank) if 1 <= n <= width]
        found += [Head(kind="shortlist", size=size)]
    return [head for head in dict.fromkeys(found) if _goes(recipe, head)]


def control_of(recipe: Recipe, target: Mapping[str, Any]) -> Shape:
    """A draft of 1 to 2% of the target, by the recipe's own count: one layer, as large as that allows.

    The stream's width, the KV heads and the kind of head stay as they are where that leaves a control at all.

    Raises:
        ValueError: nothing of that size can be cut.
    """
    stage = recipe.draft
    whole, groups = stage.hidden_size or target["hidden_size"], stage.num_kv_heads or kv_heads(target)
    found: list[tuple[tuple[float, ...], Shape]] = []
    for hidden in (whole, *(max(8, whole // n // 8 * 8) for n in (2, 3, 4, 6, 8, 16, 24))):
        for groups_kept in sorted({groups, 1}):
            for head in _small_heads(recipe, target):
                for width in _widths(recipe, target, CONTROL_PARTS):
                    draft = _cut(recipe, target, 1, width, head).model_copy(update={"size_frac": CONTROL})
                    if hidden != whole:
                        draft = draft.model_copy(update={"hidden_size": hidden, "bridge": False})
                    if groups_kept != groups:
                        draft = draft.model_copy(update={"num_kv_heads": groups_kept})
                    shape = shape_of(draft, target)
                    if shape is not None and shape.fits:
                        other = float(head.kind != stage.head.kind)
                        found.append(((-hidden, groups_kept != groups, other, -shape.frac), shape))
    if not found:
        raise ValueError(
            f"no control: no draft of {CONTROL[0]:.0%} to {CONTROL[1]:.0%} of {recipe.target.model} by "
            f"draft.size_count = {stage.size_count} can be cut, so nothing would tell whether size buys anything; "
            "draft.size_count=read counts what a drafted token reads (the embedding table is a look-up)"
        )
    return min(found, key=lambda item: item[0])[1]


def _small_heads(recipe: Recipe, target: Mapping[str, Any]) -> list[Head]:
    parts = (1, 2, 4, 8, 16, 32)
    found = dict.fromkeys(heads(recipe, target))
    for head in list(found):
        if head.size is not None:
            found |= dict.fromkeys(Head(kind="shortlist", size=max(1, head.size // n)) for n in parts)
        elif head.rank is not None:
            found |= dict.fromkeys(Head(kind="low_rank", rank=max(1, head.rank // n)) for n in parts)
    return list(found)


def _even(number: float, step: int) -> int:
    """A whole number near it, of many steps a multiple of them; at least 1 but for 0."""
    near = round(number / step) * step if number >= 2 * step else round(number)
    return near if number == 0 else max(1, near)


def _goes(recipe: Recipe, head: Head) -> bool:
    wrong = "shortlist" if recipe.distill.teacher == "topk" else None, "low_rank" if recipe.draft.lora else None
    return head.kind not in wrong


def _widths(recipe: Recipe, target: Mapping[str, Any], parts: Sequence[float]) -> set[int]:
    """Feed-forward widths: the recipe's own and shares of the target's, in whole 64s (of narrow targets 8s)."""
    whole = int(target["intermediate_size"])
    step = 64 if whole >= 512 else 8
    own = {recipe.draft.intermediate_size} if recipe.draft.intermediate_size else set()
    return {min(whole, max(step, round(part * whole / step) * step)) for part in parts} | own


def _cut(recipe: Recipe, target: Mapping[str, Any], depth: int, width: int, head: Head) -> Draft:
    """A pruned draft with the recipe's own bounds and ways, and a bridge where the target's type takes one."""
    own = recipe.draft
    straight = own.hidden_size in (None, target["hidden_size"])
    return Draft(
        num_layers=depth,
        choose=_choose(own, target["num_hidden_layers"]),
        bridge=own.bridge or (straight and target["model_type"] in PRE_NORM and own.lora is None),
        hidden_size=own.hidden_size,
        intermediate_size=None if width == target["intermediate_size"] else width,
        num_kv_heads=own.num_kv_heads,
        untie_head=own.untie_head and head.kind != "low_rank",
        head=head,
        lora=own.lora,
        size_frac=own.size_frac,
        size_count=own.size_count,
        dtype=own.dtype,
    )


def _choose(own: Draft, there: int) -> Any:
    """By which rule layers are kept: the recipe's, or the one that its named layers follow."""
    if own.layers is None:
        return own.choose
    return "ends" if list(own.layers) == [*range(len(own.layers) - 1), there - 1] else "spaced"


def rank(shapes: Sequence[Shape], costs: Sequence[Costs], ks: Sequence[int], alpha: float) -> list[Ranked]:
    """The shapes by predicted speedup at one acceptance for all, the fastest first; of equal ones what reads least.

    Args:
        shapes, costs: side by side; costs of one target, context and batch.
        ks: draft lengths that may be served.
        alpha: the acceptance.
    """
    found = []
    for shape, one in zip(shapes, costs, strict=True):
        k = max(ks, key=lambda n: (predicted_speedup(one, n, alpha), -n))
        found.append(Ranked(shape, one, k, predicted_speedup(one, k, alpha)))
    return sorted(found, key=lambda one: (-one.speedup, one.shape.read_frac, one.shape.depth))


def pick(ranked: Sequence[Ranked], head: str, num: int = FIELD) -> list[Ranked]:
    """What races: the recipe's own shape, the best of each depth, then the rest by rank; none twice but for a hair.

    Args:
        ranked: of `rank`.
        head: kind of the recipe's own; of shapes that are all but the same the one that has it.
        num: at most so many.

    Returns:
        the chosen, in their order.
    """
    taken = [one for one in ranked if one.shape.own]
    for one in (*_of_each_depth(ranked, head), *ranked):
        if len(taken) < num and not any(_alike(one.shape, other.shape) for other in taken):
            taken.append(one)
    return [one for one in ranked if one in taken]


def _of_each_depth(ranked: Sequence[Ranked], head: str) -> Iterator[Ranked]:
    """Of each depth the largest shape that is hardly slower than its fastest one, by the rank of that."""
    for depth in dict.fromkeys(one.shape.depth for one in ranked):
        same = [one for one in ranked if one.shape.depth == depth]
        near = [one for one in same if one.speedup >= same[0].speedup * (1 - HARDLY)]
        largest = max(near, key=lambda one: one.shape.frac)
        alike = [one for one in near if _alike(one.shape, largest.shape)]
        yield max(alike, key=lambda one: (one.shape.draft.head.kind == head, one.shape.frac, one.speedup))


def _alike(one: Shape, other: Shape, head: bool = False) -> bool:
    """The same depth and about the same size; with `head` only if the head is of the same kind too."""
    if one.depth != other.depth or (head and one.draft.head.kind != other.draft.head.kind):
        return False
    return max(one.frac, other.frac) < ALIKE * min(one.frac, other.frac)
