"""Tiny targets, drafts and tokenizers that the whole suite shares, and shape checks for the code under test.

The plain functions build afresh (use them when a test changes weights); the fixtures of the same name are built once.
A test file takes the functions with `from tests.conftest import make_target`.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import install_import_hook
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

# The suite tests this checkout, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Type checker of the import hook: beartype for the functions that state a shape, nothing for the others."""
    stated = (str(hint) for hint in getattr(function, "__annotations__", {}).values())
    return (
        beartype(function)
        if any(re.search(r"\b(Float|Int|Bool|Shaped|Num)\w*\[|jaxtyping", hint) for hint in stated)
        else function
    )


# Shapes written in signatures are checked under pytest only, so a user never pays for them.
install_import_hook(["engine", "distill"], "tests.conftest.check_shapes")

SPECIALS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. A draft model proposes tokens and the target verifies them.",
    "def add(first, second):\n    return first + second\n\ndef parse(line):\n    for word in line:\n        yield",
    "Anna has twelve apples and gives five of them to Ben. How many apples does she have left? Answer: seven.",
    "What is the capital of France? Paris is the capital and the largest city of France, on the river Seine.",
    "If a train travels sixty miles in two hours, its average speed is thirty miles per hour. Show your work.",
    "import os\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n        self.rows = 0",
)


def make_tokenizer(
    size: int = 500, extra_special: bool = False, prepend_bos: bool = False, template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """TOK-A: byte-level BPE with `size` entries, specials 0-4 and a ChatML template.

    Args:
        size: entries, specials and the 256 bytes included (480 gives another merge list).
        extra_special: TOK-B, one more special token at id `size`.
        prepend_bos: the tokenizer itself writes `<s>` before every text.
        template: chat template; None is a tokenizer without one.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Another size reads the corpus backwards, so that its merges (not only their number) differ.
    corpus = CORPUS if size == 500 else [text[::-1] for text in CORPUS]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(corpus, trainer)
    assert core.get_vocab_size() == size, core.get_vocab_size()
    if extra_special:
        core.add_special_tokens(["<|tool|>"])
    if prepend_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=1024
    )
    tokenizer.chat_template = template
    return tokenizer


def make_config(
    tied: bool = True,
    rows: int = 512,
    hidden: int = 64,
    layers: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    positions: int = 1024,
) -> Qwen2Config:
    """The Qwen2 configuration of T-TIED and its relatives: FFN 128, rope base 1e6."""
    return Qwen2Config(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def make_target(
    config: Qwen2Config | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random model, T-TIED when no config is given.

    The spread is chosen by trial: smaller body weights repeat one token when the head is tied; larger ones amplify
    noise so much that no noisy copy agrees half of the time. The median margin of the top token is 2.4 logits.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(copy.deepcopy(config) if config is not None else make_config())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight"):
                    weight.uniform_(0.5, 1.5)
                elif "embed_tokens" in name or "lm_head" in name:
                    weight.normal_(0.0, 1.0)
                else:
                    weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = [1, 4]
    # Parameters alone: `model.to` would also round the rotary frequencies, which a loaded model keeps in float32.
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def make_llama(tied: bool = True, layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """A random llama of T-TIED's widths and rows, float32."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if not name.endswith("norm.weight"):
                    weight.normal_(0.0, 1.0 if "embed" in name or "lm_head" in name else 0.2)
    model.generation_config.eos_token_id = [1, 4]
    return model.eval()


def make_noisy(model: PreTrainedModel, scale: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """D-NOISE: a copy with noise on every matrix, `scale` times that matrix's own spread."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() == 2:
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * scale
                weight.add_(noise.to(weight.dtype))
    return draft


@pytest.fixture(scope="session")
def tok_a() -> PreTrainedTokenizerFast:
    """TOK-A: 500 entries."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tok_b() -> PreTrainedTokenizerFast:
    """TOK-B: TOK-A and one special token at id 500."""
    return make_tokenizer(extra_special=True)


@pytest.fixture(scope="session")
def t_tied() -> PreTrainedModel:
    """T-TIED: hidden 64, 6 layers, 4 query and 2 KV heads, 512 rows, tied head. Do not change its weights."""
    return make_target()


@pytest.fixture(scope="session")
def t_untied() -> PreTrainedModel:
    """T-UNTIED: as T-TIED, with a head of its own."""
    return make_target(make_config(tied=False))


@pytest.fixture(scope="session")
def t_kv3() -> PreTrainedModel:
    """T-KV3: hidden 96, 6 query heads, 3 KV heads, head size 16."""
    return make_target(make_config(hidden=96, heads=6, kv_heads=3))


@pytest.fixture(scope="session")
def t_576(t_tied: PreTrainedModel) -> PreTrainedModel:
    """T-576: T-TIED with 64 more rows."""
    model = make_target(make_config(rows=576), seed=5)
    state = {name: weight.clone() for name, weight in t_tied.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.zeros(64, 64)])
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="session")
def d_same(t_tied: PreTrainedModel) -> PreTrainedModel:
    """D-SAME: a copy of T-TIED, the oracle draft."""
    return copy.deepcopy(t_tied)


@pytest.fixture(scope="session")
def d_noise(t_tied: PreTrainedModel) -> PreTrainedModel:
    """D-NOISE: T-TIED with noise, greedy acceptance roughly 30-80%."""
    return make_noisy(t_tied)


@pytest.fixture(scope="session")
def d_rand() -> PreTrainedModel:
    """D-RAND: a random draft of another seed."""
    return make_target(seed=7)
