"""Compiled steps give what eager ones give, and say so when they can not be had."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model import Runner
from tests.conftest import make_target

# The shape checks of this suite are Python that the compiler can not trace, so a process of its own runs without them.
CHILD = """
import copy, torch
import engine.compiled
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from transformers import LlamaConfig, LlamaForCausalLM

def model(seed):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, initializer_range=0.5, **sizes)).eval()

target, draft, prompt = model(0), model(0), (3, 11, 4, 60, 25)
with torch.no_grad():
    for weight in draft.parameters():
        weight += 0.15 * weight.std() * torch.randn_like(weight)
    text = list(prompt)
    for _ in range(16):
        text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
want, kept = text[len(prompt):], copy.deepcopy(target)

runner = Runner(target, 1, 64, compile=True)
assert runner.fixed
for drafter, k in ((None, 0), (ModelDrafter(Runner(draft, 1, 64)), 2)):
    (answer,) = Decoder(runner, set(), drafter, k).run([Request("a", prompt, 16)])
    assert answer.tokens == want, (k, answer.tokens, want)
assert 0 < sum(c.accepted for c in answer.cycles) < sum(c.proposed for c in answer.cycles)
print("equal")

half = Runner(copy.deepcopy(kept).bfloat16(), 1, 64, compile=True)
assert torch.isfinite(half.step(torch.tensor([[5]]), torch.zeros(1, dtype=torch.long), 64)).all()
print("bf16")

engine.compiled.MOST_SHAPES = 1
torch._dynamo.reset()
runner = Runner(kept, 1, 64, compile=True)
start = torch.zeros(1, dtype=torch.long)
runner.step(torch.tensor([[1]]), start, 64)
try:
    runner.step(torch.tensor([[1, 2]]), start, 64)
except torch._dynamo.exc.FailOnRecompileLimitHit:
    print("refused")
"""


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU"
)
def test_compiled_steps_decode_as_the_plain_model_and_never_fall_back() -> None:
    """Greedy, float32: a compiled baseline and chain emit the plain model's tokens; a shape too many is an error."""
    root = Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", CHILD], cwd=root, capture_output=True, text=True, timeout=300)
    assert child.stdout.split() == ["equal", "bf16", "refused"], child.stderr[-3000:]


def test_no_compiler_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no no-such-compiler was found"):
        Runner(make_target(), 1, 64, compile=True)


def test_compiled_steps_have_fixed_shapes() -> None:
    with pytest.raises(ValueError, match="fixed is False"):
        Runner(make_target(), 1, 64, fixed=False, compile=True)
