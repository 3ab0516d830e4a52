"""From a plan to a race: a whole recipe that training takes, measured or predicted, and nothing overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from distill.published import DEVICES
from distill.recipe import load_recipe
from distill.train import main as train
from eval.plan import main
from eval.plan_race import race_steps
from tests.distill.test_train import write_world

ROOT = Path(__file__).parents[2]
LARGE = ROOT / "recipes" / "qwen3-8b" / "code.yaml"
# Tiny targets are all embedding, so their drafts are counted by what a token reads.
SMALL = ("draft.size_count=read", "draft.size_frac=[0.1, 0.6]", "distill.max_steps=20")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("plan_race"))


@pytest.fixture(scope="module")
def written(world: Path) -> Path:
    path = world / "race.yaml"
    assert main([str(world / "recipe.yaml"), *SMALL, "--race", str(path)]) == 0
    return path


def test_a_measured_race_is_the_recipe_with_candidates_and_a_control(written: Path, world: Path) -> None:
    before, race = load_recipe(world / "recipe.yaml", SMALL), load_recipe(written)
    assert race.model_copy(update={"draft": before.draft}) == before
    stage = race.draft
    assert stage.kind == "race" and stage.race_steps == 5 and stage.candidates is not None
    assert before.draft in stage.candidates and 3 <= len(stage.candidates) <= 6
    assert len(set(stage.candidates)) == len(stage.candidates)
    *shapes, control = stage.candidates
    assert control.size_frac == (0.01, 0.02) and control.size_count == "read"
    assert all(one.size_frac == (0.1, 0.6) and one.dtype == "float32" for one in shapes)
    lines = written.read_text().splitlines()
    notes = [line for line, after in pairwise(lines) if after.startswith("    - {")]
    assert len(notes) == len(stage.candidates)
    assert all(" ms, " in note and "% read" in note and "at acceptance 0.5" in note for note in notes)
    assert notes[-1].endswith("the control") and sum("own shape" in note for note in notes) == 1
    speedups = [float(note.split("stored), ")[1].split("x with")[0]) for note in notes[:-1]]
    assert speedups == sorted(speedups, reverse=True)
    assert "measured on cpu (1 threads, float32), context 128" in written.read_text()
    assert not (world / "runs").exists()


def test_training_takes_it(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train([str(written), "--check"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"]["kind"] == "race"
    assert train([str(written), "distill.max_steps=6", "track.mode=disabled"]) == 0


def test_nothing_is_overwritten_and_bad_input_is_told_before_anything_loads(
    written: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written.read_text()

    def said(*words: str, file: Path = world / "other.yaml", recipe: Path = world / "recipe.yaml") -> str:
        assert main([str(recipe), *SMALL, "target.model=./none", *words, "--race", str(file)]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "is there already, and nothing is overwritten" in said(file=written)
    assert "is no folder to write to" in said(file=world / "none" / "race.yaml")
    assert "draft.kind is race already" in said(
        "draft={kind: race, race_steps: 4, candidates: [{num_layers: 1}, {num_layers: 2}]}"
    )
    assert "drafts that race are cut in one go" in said("draft.rounds=[{frac: 0.5, num_layers: 4}]")
    assert "draft.kind: race runs in one process" in said("trainer.devices=2")
    assert "distill.replay.frac" in said("distill.replay={frac: 0.9}")
    assert "drop --what-if" in said("--what-if", "draft=0.5")
    assert "drop --plan" in said("--plan", "plan.json")
    assert "give --device-table" in said("--gpu", "h100-sxm")
    assert "target.model" in said() or "none" in said()
    assert "a race needs 2" in said("draft.size_frac=[0.97, 0.98]", f"target.model={world}/target")
    assert written.read_text() == text and not (world / "other.yaml").exists()


def test_steps_are_a_quarter_but_pass_the_warm_up(world: Path) -> None:
    for overrides, steps in ((("distill.max_steps=380",), 95), (("distill.warmup_steps=8", "distill.max_steps=20"), 9)):
        assert race_steps(load_recipe(world / "recipe.yaml", overrides)) == steps


def test_a_predicted_race_needs_no_weights_and_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "race.yaml"
    code = (
        "import sys\nfrom eval.plan import main\n"
        f"given = ['{LARGE}', '--device-table', '{DEVICES}', '--gpu', 'a100-80gb', '--race', '{path}']\n"
        "assert main([*given, 'trainer.devices=1']) == 0\n"
        "assert not {'torch', 'transformers', 'lightning'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "predicted for a100-80gb from published peaks, not measured" in path.read_text()
    found = load_recipe(path)
    assert found.draft.candidates is not None and len(found.draft.candidates) == 6
    assert found.draft.race_steps == 150 and found.traffic.num_train == 20000
    assert train([str(path), "--check"]) == 0
