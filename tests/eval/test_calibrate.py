"""How far the roofline is off on this device: measured beside predicted, for a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill.recipe import load_recipe
from engine.costs import Costs
from eval.calibrate import calibrate, main, this_device
from eval.plan_table import read_factors
from tests.conftest import make_target, make_tokenizer

RECIPE = """
name: tiny
target: {{model: {folder}/target, dtype: float32}}
draft: {{num_layers: 2, size_frac: [0, 1]}}
eval: {{k: [1, 3]}}
trainer: {{accelerator: cpu, num_threads: 1}}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    make_target().save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder / "recipe.yaml"


def test_the_rates_of_this_device_are_rates() -> None:
    here = this_device("cpu")
    assert 1e8 < here.bandwidth < 1e13 and 1e8 < here.flops < 1e15 and 0 < here.replay_ms < 1
    assert here.bandwidth_frac == here.compute_frac == 1


def test_ratios_are_measured_over_predicted(path: Path) -> None:
    recipe = load_recipe(path)
    here = this_device("cpu")
    again = [
        Costs(10.0, {0: 8.0, 1: 8.8, 3: 9.6}, 3.0, context=128),
        Costs(11.0, {0: 8.0, 1: 8.0, 3: 8.0}, 3.0, context=128),
    ]
    found = calibrate(recipe, again, here)
    told = found["loads"][0]
    assert told["V(0)"]["measured_ms"] == 8.0 and told["t"]["measured_ms"] == 3.0
    assert found["measured_over_predicted"]["baseline"] == pytest.approx(8.0 / told["V(0)"]["predicted_ms"])
    assert found["measured_over_predicted"]["draft"] == pytest.approx(3.0 / told["t"]["predicted_ms"])
    assert found["factors"]["draft"] == pytest.approx(
        found["measured_over_predicted"]["draft"] / found["measured_over_predicted"]["baseline"]
    )


def test_the_command_writes_what_a_prediction_reads(path: Path, tmp_path: Path) -> None:
    assert main([str(path), "--to", str(tmp_path / "calibration.json")]) == 0
    found = json.loads((tmp_path / "calibration.json").read_text())
    assert [load["context"] for load in found["loads"]] == [128, 512]
    verify, draft = read_factors(tmp_path / "calibration.json")
    assert 0 < verify < 100 and 0 < draft < 100
    assert main([str(path), "--to", str(tmp_path / "x.json"), "target.model=/none"]) == 2
