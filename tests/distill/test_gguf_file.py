"""GGUF files: read back they are the checkpoint, other types are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from distill.convert import pre_tokenizer_name
from distill.gguf_file import KINDS, NoGguf, check_gguf, greedy_texts, refuse_gguf, write_and_check
from tests.conftest import make_llama


@pytest.mark.parametrize("tied", [True, False])
def test_read_back_it_tokenises_and_decodes_as_the_original(
    tied: bool, tmp_path: Path, tok_a: PreTrainedTokenizerFast
) -> None:
    model = make_llama(tied)
    refuse_gguf(model.config.to_dict(), tok_a)
    files = write_and_check(tmp_path, "draft", model, tok_a, [1, 4])
    assert [(f.path.name, f.kind) for f in files] == [("draft-f16.gguf", "f16"), ("draft-q8_0.gguf", "q8_0")]
    assert all(f.greedy_agreement >= KINDS[f.kind][2] and f.num_tok == 64 for f in files)
    reader = GGUFReader(tmp_path / "draft-f16.gguf")
    assert ("output.weight" in {t.name for t in reader.tensors}) == (not tied)
    fields = {name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("eos_token_id", "eot_token_id")}
    assert fields == {"eos_token_id": 1, "eot_token_id": 4}
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 512 and tokens[4] == "<|im_end|>" and tokens[511] == "[PAD511]"


def test_a_file_of_other_weights_is_refused(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    model, other = make_llama(), make_llama()
    files = write_and_check(tmp_path, "draft", model, tok_a, [1, 4])
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight[3, 5] += 0.02
    for file in files:
        with pytest.raises(NoGguf, match=r"k_proj\.weight differs"):
            check_gguf(file.path, file.kind, other, tok_a, greedy_texts(other, tok_a))


def test_other_greedy_choices_are_refused(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    model = make_llama()
    path = write_and_check(tmp_path, "draft", model, tok_a, [1, 4])[0].path
    with pytest.raises(NoGguf, match="of 64 greedy tokens agree, at least 95%"):
        check_gguf(path, "f16", model, tok_a, greedy_texts(make_llama(seed=1), tok_a))


def test_a_file_with_another_vocabulary_is_refused(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast, tok_b: PreTrainedTokenizerFast
) -> None:
    model = make_llama()
    path = write_and_check(tmp_path, "draft", model, tok_a, [1, 4])[0].path
    with pytest.raises(NoGguf, match=r"<\|tool\|>"):
        check_gguf(path, "f16", model, tok_b, greedy_texts(model, tok_b))


def test_what_is_not_llama_is_refused_by_name(t_tied: PreTrainedModel, tok_a: PreTrainedTokenizerFast) -> None:
    config = make_llama().config.to_dict()
    scaled = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}
    of_4x = {key: value for key, value in config.items() if key != "rope_parameters"}
    for change, word in (
        (t_tied.config.to_dict(), "'qwen2'"),
        (config | scaled, "'llama3'"),
        (of_4x | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        (of_4x | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        (config | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (config | {"attention_bias": True}, "attention_bias"),
        (config | {"intermediate_size": 100}, "intermediate_size is 100"),
    ):
        with pytest.raises(NoGguf, match=word):
            refuse_gguf(change, tok_a)
    refuse_gguf(of_4x | {"rope_scaling": None}, tok_a)


def test_a_weight_beyond_float16_is_refused(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    model = make_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(NoGguf, match=r"mlp.up_proj.weight holds 1e\+06"):
        write_and_check(tmp_path, "draft", model, tok_a, [1, 4])


def test_pre_tokenizer_names(tok_a: PreTrainedTokenizerFast) -> None:
    from tokenizers import pre_tokenizers as p

    class Shell:
        def __init__(self, rules: p.PreTokenizer) -> None:
            from tokenizers import Tokenizer

            self.backend_tokenizer = Tokenizer.from_str(tok_a.backend_tokenizer.to_str())
            self.backend_tokenizer.pre_tokenizer = rules

    level = p.ByteLevel(add_prefix_space=False)
    assert pre_tokenizer_name(Shell(level)) == "gpt-2"
    assert pre_tokenizer_name(Shell(p.Sequence([p.Digits(individual_digits=True), level]))) == "smollm"
    assert pre_tokenizer_name(Shell(p.Sequence([p.Digits(individual_digits=False), level]))) is None
    assert pre_tokenizer_name(Shell(p.Whitespace())) is None
