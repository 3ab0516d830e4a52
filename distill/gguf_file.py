"""A llama checkpoint as a GGUF file for llama.cpp, and the check that it reads and decodes as the original does.

llama.cpp's own converter covers every architecture, but its package on PyPI brings a `gguf` package of its own, which
would replace the one this project reads with. So the llama architecture alone is written here; others are refused.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from distill.convert import honour_pre_tokenizer, pre_tokenizer_name

# By name in the file's name: the type of the matrices, the file type, and the part of greedy steps that must agree.
# float16 holds a bfloat16 weight, so only near-ties may differ; q8_0 rounds every weight to 8 bits.
KINDS = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16, 0.95),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0, 0.85),
}
TEXTS = (
    "Hello world! It's 12345 o'clock,  isn't it?",
    "Café déjà vu - 123 😊 你好",
    "def add(a, b):\n    return a + b\n\n\tx = 3.14",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
)
NEW_TOK = 16


class NoGguf(ValueError):
    """A checkpoint that is not written as GGUF, or a GGUF file that differs from its checkpoint."""


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was checked.

    Attributes:
        path: where it lies.
        kind: "f16" or "q8_0".
        greedy_agreement: part of the original's greedy tokens that are the file's first choice as well.
        num_tok: how many were compared.
    """

    path: Path
    kind: str
    greedy_agreement: float
    num_tok: int


def refuse_gguf(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises NoGguf when a checkpoint can not be written; cheap, so that it comes before any weight is read.

    Args:
        config: contents of config.json.
        tokenizer: the checkpoint's.
    """
    rest = "; give --gguf none, and convert it with llama.cpp's convert_hf_to_gguf.py"
    if config.get("model_type") != "llama":
        raise NoGguf(f"GGUF: model type {config.get('model_type')!r} is not written, llama only{rest}")
    # transformers 5 writes rope_parameters, 4.x rope_scaling, whose type was called `type` at first.
    for name in ("rope_parameters", "rope_scaling"):
        scaling = config.get(name) or {}
        rope = scaling.get("rope_type", scaling.get("type", "default"))
        if rope != "default":
            raise NoGguf(f"GGUF: rope type {rope!r} is not written, default only{rest}")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise NoGguf(f"GGUF: {name} is not written{rest}")
    if pre_tokenizer_name(tokenizer) is None:
        raise NoGguf(f"GGUF: llama.cpp's name for this tokenizer's splitting rules is not known here{rest}")
    bad = [n for n in ("hidden_size", "intermediate_size") if config[n] % 32]
    if bad:
        raise NoGguf(f"GGUF: {bad[0]} is {config[bad[0]]}; q8_0 needs rows of a multiple of 32{rest}")


def write_gguf(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int], kind: str, name: str
) -> None:
    """Writes one file.

    Args:
        path: of the file.
        model: a llama model; `refuse_gguf` has let it pass.
        tokenizer: its tokenizer.
        eos: every id that ends a text.
        kind: a key of KINDS.
        name: for people, kept in the file.

    Raises:
        NoGguf: a weight is too large for float16; OSError: it could not be written.
    """
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("model")
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(KINDS[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, tokenizer, config.vocab_size, eos)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for key, value in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue  # llama.cpp reads the embedding table where there is no output matrix
        weight = value.detach().float().cpu()
        if key.endswith("q_proj.weight"):
            weight = _interleaved(weight, heads)
        elif key.endswith("k_proj.weight"):
            weight = _interleaved(weight, kv_heads)
        stored = names.get_name(key, try_suffixes=(".weight",))
        assert stored is not None, key
        array, dtype = _stored(weight, KINDS[kind][0], key)
        writer.add_tensor(stored, array, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    try:
        writer.write_tensors_to_file()
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy tells a short write by its counts alone
        raise OSError(errno.ENOSPC, f"No space left on device ({error})", str(path)) from error
    writer.close()


@torch.no_grad()
def greedy_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, Tensor]]:
    """What the original writes after each of TEXTS: (length of the prompt, ids [1, T] of prompt and NEW_TOK tokens)."""
    found = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        # At least NEW_TOK: an end of text must not shorten the comparison.
        whole = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOK, min_new_tokens=NEW_TOK)
        found.append((ids.shape[1], whole))
    return found


@torch.no_grad()
def check_gguf(
    path: Path,
    kind: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    written: Sequence[tuple[int, Tensor]],
) -> GgufFile:
    """Reads a file back with transformers and compares it with the original.

    The file's model reads what the original wrote and must choose the same token at the part of the steps that KINDS
    asks for. (Two free runs could not be compared beyond their first difference.)

    Args:
        path: of `write_gguf`.
        kind: a key of KINDS.
        model: the original, float32.
        tokenizer: the original's.
        written: of `greedy_texts`.

    Raises:
        NoGguf: a text or an added token has other ids, a tie is lost, a weight is off by more than the type's rounding,
            or too many greedy choices differ.
    """
    read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    honour_pre_tokenizer(read, pre_tokenizer_name(tokenizer))
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    for text in (*TEXTS, "".join(f"{token} x" for token in added), *added):
        want, got = (t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, read))
        if want != got:
            raise NoGguf(f"{path.name}: {text!r} is {want} for the original and {got} for the file")
    other = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (model, other)]
    if tied[0] != tied[1]:
        raise NoGguf(f"{path.name}: tied heads are {tied[0]} in the original and {tied[1]} in the file")
    _compare_weights(path, kind, model, other)
    # The end-of-text ids are suppressed in what the original wrote, so they are in the file's choices.
    ends = model.generation_config.eos_token_id
    same = total = 0
    for length, ids in written:
        logits = other(ids[:, :-1]).logits[0, length - 1 :]
        if ends is not None:
            logits[:, ends] = -torch.inf
        same, total = same + int((logits.argmax(-1) == ids[0, length:]).sum()), total + ids.shape[1] - length
    if same < KINDS[kind][2] * total:
        raise NoGguf(f"{path.name}: {same} of {total} greedy tokens agree, at least {KINDS[kind][2]:.0%} are needed")
    return GgufFile(path, kind, same / total, total)


def write_and_check(
    folder: Path, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> list[GgufFile]:
    """Writes NAME-KIND.gguf for every kind and checks each (arguments and errors as above)."""
    written = greedy_texts(model, tokenizer)
    files = []
    for kind in KINDS:
        path = folder / f"{name}-{kind}.gguf"
        write_gguf(path, model, tokenizer, eos, kind, name)
        files.append(check_gguf(path, kind, model, tokenizer, written))
    return files


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, rows: int, eos: Sequence[int]) -> None:
    """Vocabulary, merges and special ids. Rows past the vocabulary get names that no text holds."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for index in range(rows):
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        if index not in by_id:
            types.append(gguf.TokenType.UNUSED)
        elif index in added:
            types.append(gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in core["model"]["merges"]])
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else eos[0]
    writer.add_eos_token_id(end)
    for other in [index for index in eos if index != end][:1]:
        writer.add_eot_token_id(other)
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if index is not None:
            add(index)
    starts = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(starts) and starts[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _compare_weights(path: Path, kind: str, model: PreTrainedModel, other: PreTrainedModel) -> None:
    """float16 keeps 11 bits; q8_0 steps by 1/127 of the largest of 32 weights, which the largest of a row bounds."""
    found = other.state_dict()
    for key, want in model.state_dict().items():
        largest = want.abs().amax(-1, keepdim=True)
        step = want.abs() * 2.0**-11 + 2.0**-24 if kind == "f16" or want.dim() == 1 else largest / 127 * 0.51 + 1e-6
        # The scale of a block is a float16 itself.
        step = step if kind == "f16" else step + largest * 2.0**-10
        if found[key].shape != want.shape or bool(((found[key] - want).abs() > step).any()):
            raise NoGguf(f"{path.name}: {key} differs from the checkpoint by more than {kind} rounds")


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix [heads * D, h] in llama.cpp's order: the two halves of a rotation side by side."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def _stored(weight: Tensor, kind: gguf.GGMLQuantizationType, key: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """The bytes of a tensor: matrices as `kind`, vectors as float32."""
    array = weight.contiguous().numpy()
    if array.ndim == 1:
        return array, gguf.GGMLQuantizationType.F32
    if kind == gguf.GGMLQuantizationType.F16:
        if np.abs(array).max() > np.finfo(np.float16).max:
            raise NoGguf(f"GGUF: {key} holds {np.abs(array).max():g}, more than float16 can")
        return array.astype(np.float16), kind
    return gguf.quants.quantize(array, kind), kind
