"""The draft folder: whole or absent, loadable by stock classes, checked when read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from distill.checkpoint import BrokenDraft, read_draft, verify_draft, write_draft
from distill.tokens import TokenizerMismatch
from tests.conftest import make_target, make_tokenizer

IDS = torch.arange(20)[None]
STRINGS = [
    "Hello world!",
    "Café déjà vu - 123 😊",
    "def add(a, b):\n    return a + b",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture
def folder(tmp_path: Path, tok_a: PreTrainedTokenizerFast, t_tied: PreTrainedModel) -> Path:
    meta = {"target": {"name": "tiny"}, "size": {"stored": 1, "read": 1}}
    return write_draft(tmp_path / "draft", t_tied, tok_a, meta, [5, 3, 4], dtype="float32", eos_ids=[1, 4])


@pytest.mark.parametrize("name", ["t_tied", "t_untied"])
def test_t48_reload_keeps_logits_and_ties(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, tokenizer = request.getfixturevalue(name), request.getfixturevalue("tok_a")
    folder = write_draft(tmp_path / "draft", model, tokenizer, {}, dtype="float32")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert ("lm_head.weight" in tensors.keys()) == (name == "t_untied")  # noqa: SIM118
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (name == "t_tied")


def test_t02_rows_are_kept(folder: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.shape[0] == 512


def test_t09_shortlist_is_saved_as_true_ids(folder: Path) -> None:
    draft = read_draft(folder)
    assert draft.shortlist is not None
    assert draft.shortlist.tolist() == [3, 4, 5]
    assert draft.meta["target"] == {"name": "tiny"}


@pytest.mark.parametrize(
    ("ids", "message"), [([], "at least 1"), ([3, 512], "512"), ([-1, 3], "-1"), ([3, 3], "repeated")]
)
def test_t09_bad_shortlist_is_refused(
    ids: list[int], message: str, tmp_path: Path, t_tied: PreTrainedModel, tok_a: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(BrokenDraft, match=message):
        write_draft(tmp_path / "draft", t_tied, tok_a, {}, ids)
    assert not list(tmp_path.iterdir())


def test_t50_tokenizer_class_is_known_to_v4(folder: Path, tok_a: PreTrainedTokenizerFast) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "backend" not in config
    assert not isinstance(config.get("extra_special_tokens"), list)
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    assert [loaded(text)["input_ids"] for text in STRINGS] == [tok_a(text)["input_ids"] for text in STRINGS]
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == tok_a.apply_chat_template(messages, tokenize=False)


def test_t50_a_known_class_of_the_target_is_kept(tmp_path: Path, t_tied: PreTrainedModel) -> None:
    folder = write_draft(
        tmp_path / "draft", t_tied, make_tokenizer(), {}, dtype="float32", tokenizer_class="Qwen2TokenizerFast"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] in ("Qwen2TokenizerFast", "PreTrainedTokenizerFast")


def test_t14_rope_has_the_names_that_v4_reads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_scaling"] is None
    assert config["torch_dtype"] == config["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model.rotary_emb.inv_freq, make_target().model.rotary_emb.inv_freq)


def test_t16_sampling_defaults_do_not_travel(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    model = make_target()
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
    folder = write_draft(tmp_path / "draft", model, tok_a, {}, eos_ids=[1, 4])
    config = json.loads((folder / "generation_config.json").read_text())
    assert config["eos_token_id"] == [1, 4]
    assert config.get("temperature") in (None, 1.0)
    assert not config.get("do_sample")
    assert model.generation_config.temperature == 0.7  # the caller's model is left alone


def test_export_is_bf16_and_leaves_the_trained_weights_alone(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    model = make_target()
    folder = write_draft(tmp_path / "draft", model, tok_a, {})
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def test_low_rank_factors_lie_out_of_the_way(
    tmp_path: Path, t_untied: PreTrainedModel, tok_a: PreTrainedTokenizerFast
) -> None:
    factors = torch.randn(512, 8), torch.randn(8, 64)
    folder = write_draft(tmp_path / "draft", t_untied, tok_a, {}, factors=factors)
    read = read_draft(folder).factors
    assert read is not None
    assert all(torch.equal(a, b) for a, b in zip(read, factors))
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


def test_a_weight_that_is_not_finite_is_not_exported(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    model = make_target()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(BrokenDraft, match="norm"):
        write_draft(tmp_path / "draft", model, tok_a, {})
    assert not list(tmp_path.iterdir())


def test_t46_a_failed_write_leaves_the_older_draft(
    folder: Path, t_tied: PreTrainedModel, tok_a: PreTrainedTokenizerFast
) -> None:
    before = (folder / "draft.json").read_text()
    with pytest.raises(TypeError):
        write_draft(folder, t_tied, tok_a, {"metrics": object()})  # dies after the weights were written
    assert (folder / "draft.json").read_text() == before
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]
    write_draft(folder, t_tied, tok_a, {"step": 2})
    assert read_draft(folder).meta["step"] == 2
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


def test_verify_accepts_a_whole_draft(folder: Path, tok_a: PreTrainedTokenizerFast) -> None:
    assert verify_draft(folder, PreTrainedTokenizerFast.from_pretrained(folder), tok_a, 512).shortlist is not None


def test_verify_names_a_cut_weight_file(folder: Path, tok_a: PreTrainedTokenizerFast) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BrokenDraft, match="sha256"):
        verify_draft(folder, tok_a, tok_a, 512)
    (folder / "draft.json").unlink()  # a plain checkpoint has no checksum, but is looked at too
    with pytest.raises(BrokenDraft, match="whole"):
        verify_draft(folder, tok_a, tok_a, 512)


def test_t03_verify_refuses_another_tokenizer(folder: Path, tok_a: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TokenizerMismatch):
        verify_draft(folder, tok_a, make_tokenizer(480), 512)


def test_an_unfinished_folder_is_no_draft(tmp_path: Path) -> None:
    with pytest.raises(BrokenDraft, match=r"config\.json"):
        read_draft(tmp_path)


def test_another_format_is_refused(folder: Path) -> None:
    meta = json.loads((folder / "draft.json").read_text())
    (folder / "draft.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(BrokenDraft, match="99"):
        read_draft(folder)
