"""eval.run --check: what an evaluation would measure, and what would stop it, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill.checkpoint import write_draft
from distill.models import model_hash
from eval.run import main
from tests.conftest import make_noisy, make_target, make_tokenizer
from tests.distill.test_train import write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_world(tmp_path_factory.mktemp("check"))
    meta = {"target": {"sha256": model_hash(folder / "target")}, "traffic": {}}
    write_draft(folder / "draft", make_noisy(make_target()), make_tokenizer(), meta, dtype="float32", eos_ids=(1, 4))
    return folder


def run(world: Path, *given: str) -> int:
    return main([str(world / "recipe.yaml"), *given, "--draft", str(world / "draft"), "--check"])


def test_prompts_of_each_kind_are_counted_and_the_recipe_is_the_answer(
    world: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert run(world, "eval.num_requests=9", "eval.domains=[code, law]") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny"
    assert "code, short: 6 held-out prompts" in caplog.text
    assert "code: 6 of 9 prompts of eval.num_requests are there" in caplog.text
    assert "law: 0 of 9 prompts" in caplog.text
    assert not (world / "draft" / "eval").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("traffic.heldout={w}/none.jsonl", "none.jsonl: no such file"),
        ("traffic.heldout={w}/cut.jsonl", "cut.jsonl:2: broken line"),
        ("eval.domains=[law]", "domains found: code, math"),
        ("eval.max_new_tok=100000", "leaves no room for a prompt"),
        ("target.model={w}/nothere", "neither a bundled name"),
        ("target.model={w}/bare", "no .safetensors file"),
        ("target.model={w}/draft/none.gguf", "no such file"),
    ],
)
def test_what_would_stop_it_is_one_message_and_exit_2(
    world: Path, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "cut.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (world / "bare").mkdir(exist_ok=True)
    (world / "bare" / "config.json").write_text((world / "target" / "config.json").read_text())
    assert run(world, given.format(w=world)) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split()) and "Traceback" not in error


def test_a_schedule_is_looked_at(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(world, "eval.policies=[fixed, schedule]", f"eval.schedule={world}/none.json") == 2
    assert "no JSON can be read there" in " ".join(capsys.readouterr().err.split())


def test_a_target_that_is_not_here_is_not_fetched(world: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(world, "target.model=owner/name") == 0
    assert "not looked up here" in caplog.text and "positions are unknown" in caplog.text


def test_a_draft_of_another_target_or_of_none_is_told(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, meta in (("other", {"target": {"sha256": "0" * 64, "name": "elsewhere"}, "traffic": {}}), ("plain", {})):
        folder = write_draft(tmp_path / name, make_target(), make_tokenizer(), meta, dtype="float32", eos_ids=(1, 4))
        if not meta:
            (folder / "draft.json").unlink()
    assert main([str(world / "recipe.yaml"), "--check", *(f"--draft={tmp_path / n}" for n in ("other", "plain"))]) == 0
    assert "other: distilled from another target (elsewhere, sha256 000000000000)" in caplog.text
    assert "plain: it has no draft.json" in caplog.text
    assert run(world) == 0 and caplog.text.count("no draft.json") == 1


def test_fewer_prompts_than_a_figure_needs_is_told(world: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(world, "eval.num_requests=9", "eval.min_requests=7") == 0
    assert "6 of 9 prompts of eval.num_requests are there, fewer than eval.min_requests = 7" in caplog.text
