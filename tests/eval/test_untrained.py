"""The plan's check: an untrained draft decodes at the given acceptance, and the plan's costs are asked about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill.recipe import load_recipe
from engine.bench import measure_costs
from engine.model import Runner
from eval.untrained import NUM_REQUESTS, untrained
from tests.engine.test_speculate import DRAFTS, TARGET


def test_an_untrained_draft_is_checked_against_its_costs(tmp_path: Path) -> None:
    changes = ["eval.simulate=[0.8,0.5]", "eval.k=[1,3]", "eval.max_new_tok=24", f"output_dir={tmp_path}"]
    recipe = load_recipe("recipes/tiny.yaml", changes)
    target, draft = Runner(TARGET, 1, 300), Runner(DRAFTS["noise"], 1, 300)
    costs = measure_costs(target, draft, recipe.eval.k, [16], rounds=3, name="recipe")
    found = untrained(recipe, target, draft, "recipe", costs)
    assert found["accept"] == [0.8, 0.5] and [c["k"] for c in found["cells"]] == [1, 3]
    for cell in found["cells"]:
        assert cell["num_requests"] == NUM_REQUESTS and cell["new_tok"] == 24 and cell["context_tok"] == 16
        assert cell["predicted"] > 0 and cell["measured"] > 0
    assert found["cells"][1]["expected_tau"] == pytest.approx(1 + 0.8 + 0.4 + 0.2)
