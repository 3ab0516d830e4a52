"""A draft that must not be shipped is refused with the reason; a release is whole or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from distill.checkpoint import BrokenDraft, write_draft
from distill.licence import NoLicence, licence_of
from distill.models import ModelUnavailable, model_hash
from distill.release import (
    ReleaseRefused,
    Target,
    check_draft,
    check_reload,
    find_target,
    staged,
    write_checkpoint,
)
from distill.tokens import TokenizerMismatch
from tests.conftest import make_config, make_noisy, make_target, make_tokenizer


@pytest.fixture
def target(tmp_path: Path, t_tied: PreTrainedModel, tok_a: PreTrainedTokenizerFast) -> Target:
    folder = tmp_path / "target"
    t_tied.save_pretrained(folder)
    tok_a.save_pretrained(folder)
    return find_target(str(folder), None)


def draft_of(tmp_path: Path, target: Target, model: PreTrainedModel | None = None, **change: Any) -> Path:
    settings = {"tokenizer": target.tokenizer, "dtype": "bfloat16", "eos_ids": target.eos} | change
    meta = {"target": {"name": target.name, "sha256": target.sha256}}
    model = make_noisy(make_target()) if model is None else model
    return write_draft(tmp_path / "draft", model, meta=meta, **settings)


def edit(path: Path, **change: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_the_target_is_described_without_its_weights(target: Target) -> None:
    assert (target.rows, target.eos, target.sha256) == (512, (1, 4), model_hash(target.folder))


@pytest.mark.parametrize("shortlist", [None, [3, 4, 5]])
def test_a_good_draft_passes_and_the_copy_gives_its_logits(
    shortlist: list[int] | None, tmp_path: Path, target: Target
) -> None:
    draft, model = check_draft(draft_of(tmp_path, target, shortlist=shortlist), target)
    with staged(tmp_path / "out") as staging:
        meta = write_checkpoint(staging, draft, target, {"more": 1})
        check_reload(staging, model, target.tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft", "out", "target"]
    assert meta == json.loads((tmp_path / "out" / "draft.json").read_text())
    assert meta["more"] == 1 and meta["eos_ids"] == [1, 4]
    assert meta["rows"] == {"stored": 512, "used": 512 if shortlist is None else 3}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [1, 4]


def test_another_target_is_refused(tmp_path: Path, target: Target) -> None:
    folder = draft_of(tmp_path, target)
    edit(folder / "draft.json", target={"name": "x", "sha256": "f" * 64})
    with pytest.raises(ReleaseRefused, match="made for a target with sha256 ffffffffffff"):
        check_draft(folder, target)


def test_another_tokenizer_is_refused(tmp_path: Path, target: Target, tok_b: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TokenizerMismatch, match="id 500"):
        check_draft(draft_of(tmp_path, target, tokenizer=tok_b), target)


def test_another_template_is_refused(tmp_path: Path, target: Target) -> None:
    folder = draft_of(tmp_path, target, tokenizer=make_tokenizer(template="{{ messages[0]['content'] }}"))
    with pytest.raises(ReleaseRefused, match="chat template"):
        check_draft(folder, target)


def test_other_splitting_rules_are_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ReleaseRefused, match="splitting rules"):
        check_draft(draft_of(tmp_path, target, tokenizer=make_tokenizer(prepend_bos=True)), target)


def test_other_rows_are_refused(tmp_path: Path, target: Target, t_576: PreTrainedModel) -> None:
    with pytest.raises(ReleaseRefused, match="embedding table has 576 rows, the target's 512"):
        check_draft(draft_of(tmp_path, target, t_576), target)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_not_tied_as_the_config_says_is_refused(tied: bool, tmp_path: Path, target: Target) -> None:
    folder = draft_of(tmp_path, target, make_target(make_config(tied=tied), seed=3))
    edit(folder / "config.json", tie_word_embeddings=not tied)
    # An untied head has no weights of its own to be loaded.
    said = "1 weights are missing, first lm_head.weight" if tied else "says tie_word_embeddings = True"
    with pytest.raises(ModelUnavailable if tied else ReleaseRefused, match=said):
        check_draft(folder, target)


@pytest.mark.parametrize("eos", [1, [1], None, [1, 3, 4]])
def test_eos_ids_that_are_not_the_whole_list_are_refused(eos: Any, tmp_path: Path, target: Target) -> None:
    folder = draft_of(tmp_path, target)
    edit(folder / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ReleaseRefused, match=r"the target ends a text with \[1, 4\]"):
        check_draft(folder, target)


def test_a_changed_weight_is_refused(tmp_path: Path, target: Target) -> None:
    folder = draft_of(tmp_path, target)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BrokenDraft, match="cut or changed"):
        check_draft(folder, target)


def test_a_copy_with_other_logits_is_refused(tmp_path: Path, target: Target) -> None:
    draft, model = check_draft(draft_of(tmp_path, target), target)
    with pytest.raises(ReleaseRefused, match="logits differ by up to"), staged(tmp_path / "out") as staging:
        write_checkpoint(staging, draft, target, {})
        weights = load_file(staging / "model.safetensors")
        weights["model.norm.weight"][0] += 1
        save_file(weights, staging / "model.safetensors", {"format": "pt"})
        check_reload(staging, model, target.tokenizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft", "target"]


def test_a_low_rank_head_must_be_its_product(tmp_path: Path, target: Target) -> None:
    model = make_target(make_config(tied=False))
    factors = torch.randn(512, 8), torch.randn(8, 64)
    model.lm_head.weight.data = factors[0] @ factors[1]
    draft, _ = check_draft(draft_of(tmp_path, target, model, factors=factors), target)
    with staged(tmp_path / "out") as staging:
        write_checkpoint(staging, draft, target, {})
    assert (tmp_path / "out" / "low_rank_head" / "factors.safetensors").is_file()
    model.lm_head.weight.data = factors[0] @ factors[1] * 1.05
    with pytest.raises(ReleaseRefused, match="not the product"):
        check_draft(draft_of(tmp_path, target, model, factors=factors), target)


def test_nothing_is_left_when_a_release_fails_and_nothing_is_written_over(tmp_path: Path) -> None:
    with pytest.raises(KeyError), staged(tmp_path / "out") as staging:
        (staging / "half").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with staged(tmp_path / "out") as staging:
        (staging / "whole").write_text("x")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    with pytest.raises(ReleaseRefused, match="exists already"), staged(tmp_path / "out"):
        pass


@pytest.mark.slow
def test_what_a_killed_release_left_is_removed_and_a_running_one_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from distill.release import staged\n"
        "with staged(Path(sys.argv[1])) as s:\n (s / 'half').touch(); print('ready', flush=True); time.sleep(600)"
    )
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    with staged(tmp_path / "out") as staging:
        assert len(list(tmp_path.iterdir())) == 2  # the running one is left alone
    (tmp_path / "out").rmdir()
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 1
    with staged(tmp_path / "out") as staging:
        assert list(tmp_path.iterdir()) == [staging]


def test_licences(tmp_path: Path) -> None:
    assert licence_of("smollm2-135m-instruct", tmp_path).metadata() == {"license": "apache-2.0"}
    with pytest.raises(NoLicence, match="--licence NAME"):
        licence_of("some/model", tmp_path)
    assert licence_of("some/model", tmp_path, "MIT").metadata() == {"license": "mit"}
    odd = licence_of("some/model", tmp_path, "Our Own").metadata()
    assert odd == {"license": "other", "license_name": "our-own"}
    (tmp_path / "LICENSE").write_text("                 Apache License\n           Version 2.0, January 2004\n")
    found = licence_of("some/model", tmp_path)
    assert (found.name, [p.name for p in found.files]) == ("apache-2.0", ["LICENSE"])
    (tmp_path / "README.md").write_text("---\nlicense: llama3.1\n---\n# x\n")
    assert licence_of("some/model", tmp_path).name == "llama3.1"
    with pytest.raises(NoLicence, match=r"is under llama3\.1"):
        licence_of("some/model", tmp_path, "mit")
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: house\n---\n# x\n")
    assert licence_of("some/model", tmp_path, "House").metadata() == {"license": "other", "license_name": "house"}
