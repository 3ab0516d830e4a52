"""The shapes that a plan times: the recipe's own, as training will export it, and its neighbours."""

from __future__ import annotations

from pathlib import Path

from distill.counts import count
from distill.recipe import Recipe, load_recipe
from eval.plan import shapes_of
from eval.plan_table import shapes_of as predicted_shapes
from tests.conftest import make_config

# A last round that names no width: the draft keeps that of the round before it.
ROUNDS = "draft.rounds=[{frac: 0.3, num_layers: 5, intermediate_size: 96, num_kv_heads: 1}, {frac: 0.3, num_layers: 4}]"


def recipe(folder: Path, *overrides: str) -> Recipe:
    (folder / "recipe.yaml").write_text("name: small\ndraft: {num_layers: 3, size_frac: [0, 1]}\n")
    return load_recipe(folder / "recipe.yaml", overrides)


def test_a_draft_that_is_cut_in_rounds_is_timed_at_the_shape_of_the_last(tmp_path: Path) -> None:
    target = make_config(layers=8)
    found = shapes_of(recipe(tmp_path, ROUNDS), target)
    assert [name for name, *_ in found] == ["recipe", "1 layer", "2 layers", "4 layers"]
    for (_, config, *_), depth in zip(found, (3, 1, 2, 4)):
        widths = config.num_hidden_layers, config.intermediate_size, config.num_key_value_heads, config.hidden_size
        assert widths == (depth, 96, 1, 64)
    narrower = shapes_of(recipe(tmp_path, ROUNDS, "draft.intermediate_size=80"), target)
    assert {config.intermediate_size for _, config, *_ in narrower} == {80}
    in_one_go = shapes_of(recipe(tmp_path), target)
    assert {(c.intermediate_size, c.num_key_value_heads) for _, c, *_ in in_one_go} == {(128, 2)}


def test_what_is_predicted_has_the_shape_that_is_measured(tmp_path: Path) -> None:
    target = make_config(layers=8)
    for overrides in ((), (ROUNDS,), (ROUNDS, "draft.head={kind: shortlist, size: 64}")):
        one = recipe(tmp_path, *overrides)
        built = [(name, count(config.to_dict(), rows, rank)) for name, config, rows, rank in shapes_of(one, target)]
        assert [(name, count(c, *head)) for name, c, head in predicted_shapes(one, target.to_dict())] == built
