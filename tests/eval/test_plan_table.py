"""A plan from a device table: predicted and marked so, no weights, no torch, and "do not train" where it is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distill.devices import read_devices
from distill.published import DEVICES
from distill.recipe import load_recipe
from distill.roofline import step_ms
from engine import costs as model
from engine.costs import Costs
from engine.surface import fit_surface
from eval.plan import main, predict_plans
from eval.plan_table import CALIBRATION, predict_plan, read_factors, table_of
from eval.plan_view import case_of_plan, load_table, tables, verdict

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "llama-3.1-8b" / "code.yaml"


def plan(gpu: str = "h100-sxm", *overrides: str, **changes: Any) -> dict[str, Any]:
    return predict_plan(load_recipe(RECIPE, overrides), replace(read_devices()[gpu], **changes))


def text(table: Any) -> str:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_a_baseline_step_is_near_a_published_one() -> None:
    """gpt-fast, compiled, makes 104.9 tokens/s of Llama-2-7B in bf16 on an A100-80GB (its README): 9.5 ms a token."""
    llama2 = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    assert step_ms(read_devices()["a100-80gb"], llama2, 1, 1, 100) == pytest.approx(9.5, rel=0.15)


def test_it_is_marked_and_has_every_load_and_shape() -> None:
    found = plan()
    assert found["predicted"] is True
    assert {s["name"] for s in found["shapes"]} == {
        "recipe",
        "1 layer",
        "2 layers",
        "4 layers",
        "16 layers",
        "whole head",
    }
    costs = [Costs.from_json(c) for c in found["costs"]]
    assert all(c.device == "h100-sxm (predicted)" for c in costs)
    loads = {(c.context, c.batch) for c in costs if c.draft == "recipe"}
    # 64 rows of 8,192 tokens are 69 GB of keys and values, beside 19 GB of weights.
    assert loads == {(c, b) for c in (128, 512, 2048, 8192) for b in (1, 4, 16, 64)} - {(8192, 64)}
    assert verdict(found, 1.05).startswith("Predicted, not measured: The recipe's shape gives")
    for table in (*tables(found), load_table(case_of_plan(found, 256), predicted=True)):
        assert "redicted" in table.title
    own = found["shapes"][0]
    assert 0.05 <= own["read_frac"] <= 0.10 and own["layers"] == 3


def test_the_surface_through_predicted_costs_is_the_prediction() -> None:
    costs = [Costs.from_json(c) for c in plan()["costs"] if c["draft"] == "recipe"]
    surface = fit_surface(costs)
    for c in costs:
        if c.batch * 7 <= 64:  # bound by memory, as the fit's form is
            assert surface.at(c.context, c.batch).V_ms[4] == pytest.approx(c.V_ms[4], rel=0.1)


def test_speculation_that_cannot_pay_is_not_trained() -> None:
    # A device whose products are slower than its memory even for one token: a pass of six takes six times as long.
    slow = plan(flops=1e12)
    said = verdict(slow, 1.05)
    assert said.startswith("Predicted, not measured: Do not train: even a perfect draft gives")
    first = Costs.from_json(slow["costs"][0])
    assert max(model.predicted_speedup(first, k, 1.0) for k in first.ks) < 1.05
    assert "do not train" in text(table_of([slow], 1.05)) and "do not train" not in text(table_of([plan()], 1.05))


def test_what_does_not_fit_is_said() -> None:
    small = plan("rtx-4090", "target.model=google/gemma-3-12b-it", "draft={num_layers: 3, size_count: read}")
    assert verdict(small, 1.05).startswith("Does not fit: target and draft take 27 GB, rtx-4090 has 24 GB")
    assert "does not fit: 27 of 24 GB" in text(table_of([small], 1.05))


def test_a_race_and_a_pretrained_draft_have_shapes(tmp_path: Path) -> None:
    race = "draft={kind: race, race_steps: 100, candidates: [{num_layers: 2}, {num_layers: 3, size_count: read}]}"
    found = plan("h100-sxm", race, "trainer.devices=1")
    assert [s["name"] for s in found["shapes"]] == ["candidate 0", "candidate 1"]
    own = plan("h100-sxm", "draft={kind: pretrained, model: Qwen/Qwen3-8B, size_frac: [0, 1]}")
    assert [s["name"] for s in own["shapes"]] == ["recipe"] and own["shapes"][0]["read_frac"] > 1
    with pytest.raises(ValueError, match=r"not looked up here.*nothing can be predicted"):
        plan("h100-sxm", "target.model=owner/name")
    with pytest.raises(ValueError, match=r"draft\.layers \[0, 1, 99\]"):
        plan("h100-sxm", "draft.layers=[0, 1, 99]")


def test_the_calibration_that_ships_was_measured_and_is_applied() -> None:
    kept = json.loads(CALIBRATION.read_text())
    verify, draft = read_factors()
    over = kept["measured_over_predicted"]
    assert verify == pytest.approx(max(1.0, over["verify"] / over["baseline"]))
    assert draft == pytest.approx(over["draft"] / over["baseline"])
    assert kept["device"] and kept["time"] and kept["loads"]
    one, _ = predict_plans(load_recipe(RECIPE), DEVICES, None, CALIBRATION)
    assert one["costs"][0]["t_ms"] == pytest.approx(draft * plan()["costs"][0]["t_ms"])
    with pytest.raises(ValueError, match=r"write one: python -m eval\.calibrate"):
        read_factors(ROOT / "none.json")


def test_the_command_needs_no_torch_and_writes_no_measured_plan(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom eval.plan import main\n"
        f"given = ['{RECIPE}', '--device-table', '{DEVICES}', 'output_dir={tmp_path}', '--what-if', 'batch=16']\n"
        "assert main(given) == 0\n"
        "assert not {'torch', 'transformers', 'lightning'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in ("Predicted, not measured: meta-llama/Llama-3.1-8B-Instruct", "l40s", "break-even alpha", "V ms"):
        assert words in done.stdout, words
    folder = tmp_path / "llama-3.1-8b-code"
    assert [path.name for path in folder.iterdir()] == ["plan-h100-sxm-predicted.json"]
    assert json.loads((folder / "plan-h100-sxm-predicted.json").read_text())["predicted"] is True


def test_a_wrong_device_or_table_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(RECIPE), "--device-table", str(DEVICES), f"output_dir={tmp_path}"]
    assert main([*given, "--gpu", "h300"]) == 2
    assert "--gpu = 'h300' is not in the device table" in capsys.readouterr().err.replace("\n", " ")
    assert main([str(RECIPE), "--device-table", str(tmp_path / "none.json")]) == 2
