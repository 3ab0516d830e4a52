"""Which shapes race: within the bounds, apart from each other, ranked by cost alone, with a control."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from distill.published import published_config
from distill.recipe import Draft, Head, Recipe, load_recipe
from engine.costs import Costs
from eval.shapes import ALIKE, FIELD, Ranked, Shape, control_of, heads, pick, rank, shapes_within

ROOT = Path(__file__).parents[2]
COSTS = Costs(T_ms=10.0, V_ms={0: 10.0, 1: 10.0, 2: 10.0}, t_ms=0.0)


def recipe(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / "qwen3-8b" / "code.yaml", ["trainer.devices=1", *overrides])


@pytest.fixture(scope="module")
def target() -> dict[str, Any]:
    found = published_config("Qwen/Qwen3-8B")
    assert found is not None
    return dict(found)


def shape(depth: int, frac: float, own: bool = False) -> Shape:
    return Shape(Draft(num_layers=depth, size_count="read"), {"num_hidden_layers": depth}, frac, frac, own)


def ranked(*shapes: tuple[int, float, float], own: int | None = None) -> list[Ranked]:
    """Of (layers, share, t)."""
    made = [shape(depth, frac, number == own) for number, (depth, frac, _) in enumerate(shapes)]
    return rank(made, [replace(COSTS, t_ms=t) for *_, t in shapes], (1, 2), 0.5)


def test_a_cheaper_shape_never_ranks_below_a_dearer_one() -> None:
    found = ranked((3, 0.09, 2.0), (1, 0.05, 0.5), (2, 0.07, 1.0), (1, 0.09, 1.0), (6, 0.06, 4.0))
    times = [one.costs.t_ms for one in found]
    assert times == sorted(times)
    assert [one.shape.read_frac for one in found if one.costs.t_ms == 1.0] == [0.07, 0.09]
    # By hand: tau(1) = 1.5, tau(2) = 1.75; 15 / 10.5 and 17.5 / 11.
    assert (found[0].k, found[0].speedup) == (2, pytest.approx(17.5 / 11))
    # 15 / 14 and 17.5 / 18: with a slow draft one proposal is better.
    assert (found[-1].k, found[-1].speedup) == (1, pytest.approx(15 / 14))


def test_of_each_depth_races_the_widest_that_costs_hardly_any_speed() -> None:
    # One layer: 1.591, 1.577 (0.9% less) and 1.458 (8% less) at k = 2.
    found = pick(ranked((1, 0.05, 0.5), (1, 0.07, 0.55), (1, 0.10, 1.0), (2, 0.05, 1.5), (3, 0.05, 2.5)), "full", 3)
    assert [(one.shape.depth, one.shape.frac) for one in found] == [(1, 0.07), (2, 0.05), (3, 0.05)]


def test_of_shapes_that_are_all_but_the_same_the_recipes_kind_of_head_races() -> None:
    one, other = ranked((2, 0.08, 1.0), (2, 0.081, 1.0))
    low_rank = replace(other.shape, draft=Draft(num_layers=2, head=Head(kind="low_rank", rank=8)))
    found = [one, replace(other, shape=low_rank)]
    assert [pick(found, kind)[0].shape.draft.head.kind for kind in ("full", "low_rank")] == ["full", "low_rank"]


def test_the_recipes_own_shape_always_races_and_stands_for_what_is_like_it() -> None:
    given = ((1, 0.05, 0.5), (2, 0.06, 0.8), (3, 0.08, 3.0), (3, 0.09, 3.1), (4, 0.06, 1.0))
    found = pick(ranked(*given, own=3), "full", 3)
    assert [one.shape.depth for one in found] == [1, 2, 3] and found[-1].shape.own
    assert [one.shape.depth for one in pick(ranked(*given, own=3), "full", 5)] == [1, 2, 4, 3]


def test_what_is_left_fills_the_race_but_nothing_twice() -> None:
    found = pick(ranked((1, 0.05, 0.5), (1, 0.06, 0.9), (1, 0.08, 1.6), (2, 0.05, 1.0)), "full")
    assert [(one.shape.depth, one.shape.frac) for one in found] == [(1, 0.05), (2, 0.05), (1, 0.08)]


def test_every_shape_is_within_the_bounds_and_apart(target: dict[str, Any]) -> None:
    found = shapes_within(recipe(), target)
    assert {one.depth for one in found} == {1, 2, 3, 4, 5, 6}
    assert all(0.05 <= one.read_frac <= 0.10 for one in found)
    for one, other in combinations(found, 2):
        same = one.depth == other.depth and one.draft.head.kind == other.draft.head.kind
        assert not same or max(one.frac, other.frac) >= ALIKE * min(one.frac, other.frac)
    assert all(one.draft.choose == "ends" and one.draft.bridge for one in found)
    assert {one.draft.head.kind for one in found} == {"shortlist", "low_rank"}
    assert len(found) < 60  # all of them are timed
    assert len(pick(rank(found, [COSTS] * len(found), (1, 2), 0.5), "shortlist")) == FIELD


def test_layers_are_chosen_as_the_recipe_chooses(target: dict[str, Any]) -> None:
    for overrides, choose in (
        (("draft.layers=[0, 18, 35]",), "spaced"),
        (("draft.layers=null", "draft.num_layers=3", "draft.choose=influence"), "influence"),
    ):
        assert {one.draft.choose for one in shapes_within(recipe(*overrides), target)} == {choose}


def test_a_head_that_does_not_go_with_the_recipe_is_not_tried(target: dict[str, Any]) -> None:
    kinds = {head.kind for head in heads(recipe("draft.lora={rank: 8}"), target)}
    assert kinds == {"shortlist"}
    kinds = {head.kind for head in heads(recipe("draft.head={kind: full}", "distill.teacher=topk"), target)}
    assert kinds == {"full", "low_rank"}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("draft.head={kind: full}",),
        ("draft.head={kind: low_rank, rank: 800}",),
        ("draft.size_count=stored",),
        ("draft.head={kind: full}", "distill.teacher=topk", "draft.size_count=stored"),
        ("target.model=google/gemma-3-12b-it", "draft.bridge=false"),
    ],
)
def test_there_is_a_control_of_one_to_two_percent(overrides: tuple[str, ...]) -> None:
    one = recipe(*overrides)
    config = published_config(one.target.model)
    assert config is not None
    control = control_of(one, config)
    assert 0.01 <= control.frac <= 0.02 and control.depth == 1 and control.fits
    assert control.draft.size_count == one.draft.size_count
    if not overrides:
        assert control.draft.hidden_size is None and control.draft.head.kind == "shortlist"


def test_a_target_of_which_no_control_can_be_cut_says_what_to_do() -> None:
    config = published_config("google/gemma-3-12b-it")
    assert config is not None
    one = recipe("target.model=google/gemma-3-12b-it", "draft.bridge=false", "draft.size_count=stored")
    with pytest.raises(ValueError, match=r"no control: .*size_count = stored.*size_count=read"):
        control_of(one, config)
