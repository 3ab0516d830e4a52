"""The engine's attention and slab against the plain model, for every decoder family that is claimed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from engine.cache import Slab, kv_bytes_per_token
from engine.dense import causal_attention
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXTRA = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []},
}


@pytest.mark.parametrize("kind", EXTRA)
def test_steps_over_the_slab_equal_the_plain_model(kind: str) -> None:
    """Prefill, single steps, a block, a rollback and another block, two ragged rows; logits within 1e-4."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, **EXTRA[kind]})
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    ours.load_state_dict(plain.state_dict())
    runner = Runner(ours, 2, 64)
    text = torch.randint(1, 97, (2, 40))
    lengths = [13, 5]
    with torch.inference_mode():
        whole = plain(text).logits
        for row, n in enumerate(lengths):
            got = runner.logits(runner.prefill(text[row, :n], row))
            assert torch.allclose(got, whole[row, :n], atol=1e-4), "prefill"
        start = torch.tensor(lengths)

        def block(size: int) -> None:
            nonlocal start
            ids = torch.stack([text[row, int(s) : int(s) + size] for row, s in enumerate(start)])
            got = runner.logits(runner.step(ids, start, int(start.max()) + size))
            want = torch.stack([whole[row, int(s) : int(s) + size] for row, s in enumerate(start)])
            assert torch.allclose(got, want, atol=1e-4), (size, (got - want).abs().max())
            start = start + size

        block(1)
        block(5)
        # Wrong tokens, rolled back by arithmetic: what they left in the slab must not be seen.
        runner.step(torch.randint(1, 97, (2, 6)), start, int(start.max()) + 6)
        block(3)
        block(8)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_one_row_steps_equal_the_plain_model(kind: str) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**BASE, **EXTRA[kind]})
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    ours.load_state_dict(plain.state_dict())
    runner = Runner(ours, 1, 64)
    text = torch.randint(1, 97, (1, 30))
    with torch.inference_mode():
        whole = plain(text).logits
        runner.prefill(text[0, :10])
        for start, size in ((10, 1), (11, 4), (15, 1), (14, 2), (16, 9)):
            ids = text[:, start : start + size]
            got = runner.logits(runner.step(ids, torch.tensor([start]), start + size))
            assert torch.allclose(got, whole[:, start : start + size], atol=1e-4)


def test_slab_bytes_equal_the_formula() -> None:
    config = AutoConfig.for_model("llama", **BASE)
    slab = Slab.for_model(config, 3, 50, torch.bfloat16)
    assert slab.nbytes == 2 * 4 * 2 * 16 * 2 * 3 * 50 == 3 * 50 * kv_bytes_per_token(config, torch.bfloat16)


def test_empty_slab_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Slab(1, 0, 1, 10, 8, torch.float32)


@pytest.mark.parametrize(
    ("ids", "message"), [([], "at least one"), ([3, 2], "sorted"), ([1, 1], "sorted"), ([5, 97], "rows 0..96")]
)
def test_bad_shortlist_is_refused(ids: list[int], message: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **BASE))
    with pytest.raises(ValueError, match=message):
        Runner(model, 1, 8, torch.tensor(ids, dtype=torch.long))


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("tokens", [1, 2, 37, 512, 513, 700, 768])
def test_causal_products_equal_the_kernel(tokens: int, scaling: float | None) -> None:
    """bf16 on a CPU takes products, over 512 tokens block by block; the kernel in float64 is the reference."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, tokens, 16).bfloat16() for heads in (6, 2, 2))
    got = causal_attention(query, key, value, scaling)
    wide = (query.double(), key.double().repeat_interleave(3, 1), value.double().repeat_interleave(3, 1))
    want = scaled_dot_product_attention(*wide, is_causal=True, scale=scaling)
    assert got.shape == want.shape and (got.double() - want).abs().max() < 0.04  # a few steps of bf16 at 1


def test_a_growing_slab_keeps_what_rows_hold() -> None:
    slab = Slab(3, 2, 2, 400, 4, torch.float32)
    assert slab.slots == 64
    want = torch.randn(3, 2, 2, 2, 400, 4)
    done = 0
    for extent in (10, 64, 65, 130, 399, 400):
        slab.ensure(extent)
        assert extent <= slab.slots <= 400
        for layer in range(3):
            slab.key[layer][:, :, done:extent] = want[layer, 0, :, :, done:extent]
            slab.value[layer][:, :, done:extent] = want[layer, 1, :, :, done:extent]
            assert torch.equal(slab.key[layer][:, :, :extent], want[layer, 0, :, :, :extent])
            assert torch.equal(slab.value[layer][:, :, :extent], want[layer, 1, :, :, :extent])
        done = extent


@pytest.mark.parametrize("rows", [1, 3])
def test_many_keys_take_batched_products_over_whole_rows(rows: int) -> None:
    """Past 1,024 keys a step on a CPU uses other kernels; what lies behind a row's end must not be seen."""
    torch.manual_seed(2)
    config = AutoConfig.for_model("llama", **{**BASE, "max_position_embeddings": 4096})
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    ours.load_state_dict(plain.state_dict())
    runner = Runner(ours, rows, 2300)
    text = torch.randint(1, 97, (rows, 2200))
    lengths = [2100, 900, 33][:rows]
    for layer in range(4):
        runner.slab.key[layer].fill_(3.0)
        runner.slab.value[layer].fill_(5.0)
    with torch.inference_mode():
        for row, n in enumerate(lengths):
            runner.prefill(text[row, :n], row)
        ids = torch.stack([text[row, n : n + 3] for row, n in enumerate(lengths)])
        got = runner.logits(runner.step(ids, torch.tensor(lengths), max(lengths) + 3))
        for row, n in enumerate(lengths):
            want = plain(text[row : row + 1, : n + 3]).logits[0, -3:]
            assert torch.allclose(got[row], want, atol=1e-4), (got[row] - want).abs().max()


def test_a_slab_forgets_its_longest_row() -> None:
    """A long text before must not make the steps of short ones read more slots, nor leave anything in them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **BASE)).eval()
    runner, fresh = Runner(model, 2, 60), Runner(model, 2, 60)
    texts = torch.randint(0, 97, (2, 9))
    runner.prefill(torch.randint(0, 97, (60,)), 1)
    assert runner.slab.slots == 60
    runner.forget(10)
    got, want = [], []
    for each, found in ((runner, got), (fresh, want)):
        for row, ids in enumerate(texts):
            found.append(each.prefill(ids, row))
        found.append(each.step(texts[:, :2], torch.tensor([9, 9]), 11))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_forgetting_lays_out_what_is_asked_for() -> None:
    slab = Slab(1, 2, 1, 500, 4, torch.float32)
    slab.ensure(400)
    for positions, slots in ((0, 64), (64, 64), (65, 128), (1000, 500)):
        slab.forget(positions)
        assert slab.slots == slots == slab.key[0].shape[2]


def test_a_decoder_forgets_between_requests() -> None:
    config = AutoConfig.for_model("llama", **{**BASE, "max_position_embeddings": 400})
    model = AutoModelForCausalLM.from_config(config).eval()
    runner, draft = Runner(model, 2, 300), Runner(model, 2, 300)
    decoder = Decoder(runner, (), ModelDrafter(draft), 2)
    long, short = Request("a", tuple(range(90)) * 3, 4), Request("b", (1, 2, 3), 4)
    list(decoder.run([long]))
    assert min(runner.slab.slots, draft.slab.slots) > 256
    again = next(iter(decoder.run([short]))).tokens
    assert runner.slab.slots == draft.slab.slots == 64
    alone = Decoder(Runner(model, 2, 300), (), ModelDrafter(Runner(model, 2, 300)), 2)
    assert again == next(iter(alone.run([short]))).tokens
