"""LoRA: nothing moves at the start, updates alone are trained, and the merged draft is the tuned one, on disk too."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.adapt import add_lora, merge_lora
from distill.checkpoint import read_draft, write_draft
from distill.fit import moved
from distill.look import look
from distill.recipe import load_recipe
from distill.schema_draft import Lora
from distill.train import main
from tests.conftest import make_config, make_noisy, make_target, make_tokenizer
from tests.distill.test_prune import CONFIGS, make_model
from tests.distill.test_train import newest, train_rows, write_world

LORA = Lora(rank=4, alpha=8.0)


@torch.no_grad()
def logits(model: PreTrainedModel, rows: int = 96) -> Tensor:
    ids = torch.randint(4, rows, (2, 24), generator=torch.Generator().manual_seed(9))
    return model(ids, use_cache=False).logits


def tune(model: PreTrainedModel) -> None:
    """Updates as training may leave them."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_t49_merged_and_saved_is_what_was_trained(kind: str, tied: bool, tmp_path: Path) -> None:
    model = make_model(kind, tied)
    before, original = logits(model), copy.deepcopy(model.state_dict())
    trained = add_lora(model, LORA)
    assert torch.equal(logits(model), before)
    assert trained == sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert all(("lora_" in name) == weight.requires_grad for name, weight in model.named_parameters())
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 6 * 7
    tune(model)
    tuned = logits(model)
    assert (tuned - before).abs().max() > 0.1
    merged = merge_lora(copy.deepcopy(model))
    torch.testing.assert_close(logits(merged), tuned, rtol=1e-4, atol=1e-3)
    assert merged.state_dict().keys() == original.keys()
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == tied
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(merged.state_dict()[name], original[name]), name
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=0, atol=1e-4)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied


def test_t49_through_the_draft_folder(tmp_path: Path) -> None:
    model = make_target(make_config(layers=2))
    add_lora(model, LORA)
    tune(model)
    tuned = logits(model, 500)
    write_draft(tmp_path / "draft", merge_lora(copy.deepcopy(model)), make_tokenizer(), {}, dtype="float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    torch.testing.assert_close(logits(loaded, 500), tuned, rtol=1e-4, atol=1e-3)
    names = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert names["tie_word_embeddings"] and not any("lora" in path.name for path in (tmp_path / "draft").iterdir())


def test_an_update_that_is_not_finite_is_no_draft() -> None:
    model = make_target(make_config(layers=2))
    add_lora(model, LORA)
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaNs"):
        merge_lora(model)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and beside it a draft that is nearly the target."""
    folder = write_world(tmp_path_factory.mktemp("adapt"))
    make_noisy(make_target(), 0.05).save_pretrained(folder / "near")
    make_tokenizer().save_pretrained(folder / "near")
    return folder


def stage(world: Path, more: str = "") -> str:
    return f"draft={{kind: pretrained, model: {world}/near, size_frac: [0, 1], dtype: float32{more}}}"


@pytest.mark.parametrize("head", ["", ", head: {kind: shortlist, size: 256}"])
def test_a_pretrained_draft_is_tuned_by_its_updates_alone(head: str, world: Path, tmp_path: Path) -> None:
    arguments = [f"output_dir={tmp_path}/runs", "track.mode=disabled", "distill.lr=3e-3"]
    lora = stage(world, f", lora: {{rank: 8, alpha: 16.0}}{head}")
    assert main([str(world / "recipe.yaml"), *arguments, lora]) == 0
    run = newest(tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(run / "draft")
    source = AutoModelForCausalLM.from_pretrained(world / "near")
    changed = {
        name for name, weight in draft.state_dict().items() if not torch.equal(weight, source.state_dict()[name])
    }
    meta = read_draft(run / "draft").meta
    assert meta["lora"] == {"rank": 8, "alpha": 16.0, "dropout": 0.0}
    assert meta["metrics"]["step"] > 0  # else the draft as it came is kept, see below
    linear = {
        f"{name}.weight" for name, part in source.model.named_modules(prefix="model") if isinstance(part, nn.Linear)
    }
    assert changed == linear
    taken = [row["loss"] for row in train_rows(run) if "loss" in row]
    assert sum(taken[-3:]) < sum(taken[:3])
    assert torch.isfinite(torch.tensor(taken)).all()


def test_a_tuned_draft_keeps_the_rows_that_it_was_trained_with(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = list(range(1, 512, 2))
    near = AutoModelForCausalLM.from_pretrained(world / "near")
    write_draft(tmp_path / "own", near, make_tokenizer(), {}, rows, dtype="float32")
    arguments = [str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", "track.mode=disabled"]
    arguments += ["distill.max_steps=2", "distill.warmup_steps=1"]
    own = f"draft={{kind: pretrained, model: {tmp_path}/own, size_frac: [0, 1], dtype: float32"
    assert main([*arguments, f"{own}, head: {{kind: shortlist, size: 256}}}}"]) == 0
    assert read_draft(newest(tmp_path) / "draft").shortlist.tolist() == rows
    assert "was trained with a shortlist of 256 rows" not in caplog.text
    assert main([*arguments, f"{own}, head: {{kind: shortlist, size: 128}}}}"]) == 0
    assert "was trained with a shortlist of 256 rows; draft.head = {kind: shortlist, size: 256}" in caplog.text
    (told,) = (text for text in look(load_recipe(arguments[0], [f"{own}}}"]), "recipe") if "shortlist" in text)
    assert "size: 256} keeps; with {'kind': 'full'} they are not kept" in told


def test_the_whole_draft_is_tuned_by_default_and_judged_against_itself(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", "track.mode=disabled", stage(world)]
    assert main([*arguments, "distill.lr=3e-3"]) == 0
    run = newest(tmp_path)
    assert [row["step"] for row in train_rows(run) if "val/speedup" in row] == [0, 5, 10]
    metrics = read_draft(run / "draft").meta["metrics"]
    assert ("acceptance on held-out answers: code" in caplog.text) is (metrics["step"] > 0)
    assert metrics["tuned/code/to"] == pytest.approx(metrics["val/code/alpha"])
    first = next(row for row in train_rows(run) if "val/speedup" in row)
    assert metrics["tuned/code/from"] == pytest.approx(first["val/code/alpha"])
    if read_draft(run / "draft").meta["metrics"]["step"]:
        draft = AutoModelForCausalLM.from_pretrained(run / "draft")
        assert not torch.equal(draft.model.norm.weight, make_target().model.norm.weight)


def test_tuning_that_does_harm_keeps_the_draft_and_says_so(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", "track.mode=disabled", stage(world)]
    assert main([*arguments, "distill.lr=0.3"]) == 0
    (told,) = (record for record in caplog.records if "no validation of this tuning promised more" in record.message)
    assert "speed than the draft as it came" in told.message and told.levelname == "WARNING"
    assert "did not move beyond chance" not in caplog.text
    draft = read_draft(newest(tmp_path) / "draft")
    assert draft.meta["metrics"]["step"] == 0 and draft.meta["metrics"]["tuned/moved"] is False
    kept, source = (AutoModelForCausalLM.from_pretrained(path) for path in (draft.folder, world / "near"))
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in kept.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([2, 2, 2, 2], True),  # every answer gains as much: whatever is drawn, 0.02
        ([20, 0, 0, -12], False),  # the same gain together, but it rests on one answer
        ([-2, -2, -2, -2], False),
        ([2], False),  # one answer shows nothing
    ],
)
def test_a_move_must_be_more_than_chance(changes: list[int], expected: bool) -> None:
    start, best = {"code": [(50, 100) for _ in changes]}, {"code": [(50 + change, 100) for change in changes]}
    for domain in ("code", "mixed"):
        told = moved(start, best, domain)
        assert told.better is told.figures["tuned/moved"] is expected
        fell = max(changes) < 0
        assert ("did not move beyond chance" in told.text) is (not expected and not fell)
        assert ("it fell" in told.text) is fell
        assert told.figures["tuned/code/from"] == 0.5
        assert told.figures["tuned/code/to"] == pytest.approx(0.5 + sum(changes) / (100 * len(changes)))
        assert told.figures["tuned/code/low"] <= sum(changes) / (100 * len(changes)) <= told.figures["tuned/code/high"]
    if len(set(changes)) == 1:
        assert told.figures["tuned/code/low"] == pytest.approx(changes[0] / 100)


def test_only_the_domain_trained_for_counts_where_it_was_validated() -> None:
    same, more = [(50, 100)] * 3, [(60, 100)] * 3
    start, best = {"code": same, "qa": same}, {"code": same, "qa": more}
    assert not moved(start, best, "code").better and moved(start, best, "mixed").better
