"""Forced logits equal the plain model's; a rounding tie and a planted bug are told apart."""

from __future__ import annotations

import copy

import pytest
import torch

from engine.divergence import classify, compare_greedy, forced_logits
from engine.draft import ModelDrafter
from engine.model import Runner
from tests.engine.test_speculate import DRAFTS, REFERENCE, TARGET, VOCAB, plain_greedy, tiny

PROMPT = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("width", [1, 2, 5, 9])
@pytest.mark.parametrize("num", [1, 4, 17])
@pytest.mark.parametrize("fixed", [False, True])
def test_forced_logits_are_the_plain_models(width: int, num: int, fixed: bool) -> None:
    answer = torch.randint(0, VOCAB, (num,), generator=torch.Generator().manual_seed(num)).tolist()
    got = forced_logits(Runner(TARGET, 1, 100, fixed=fixed), PROMPT, answer, width)
    with torch.no_grad():
        want = REFERENCE(torch.tensor([[*PROMPT, *answer]])).logits[0, len(PROMPT) - 1 : -1]
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-4)


def test_a_step_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt has 3 tokens"):
        forced_logits(Runner(TARGET, 1, 100), PROMPT[:3], [1, 2], 4)


def test_a_planted_bug_is_no_tie() -> None:
    """In float32 the noise is 1e-6, so another token than the best one is beyond it."""
    plain = plain_greedy(PROMPT, 12, set())
    wrong = [*plain[:7], (plain[7] + 1) % VOCAB, *plain[8:]]
    found = classify(Runner(TARGET, 1, 100), "a", PROMPT, plain, wrong, 3)
    assert found is not None and found.place == 7 and not found.tie
    assert found.margin > 0.01 > found.noise >= found.noise_here > 0
    assert classify(Runner(TARGET, 1, 100), "a", PROMPT, plain, plain, 3) is None


def test_a_margin_within_rounding_is_a_tie() -> None:
    """Two head rows that are equal but for less than bf16 can hold: which of them wins is decided by rounding."""
    model = copy.deepcopy(tiny(0)).bfloat16()
    plain = Runner(model, 1, 100)
    first = int(forced_logits(plain, PROMPT, [0], 1)[-1].argmax())
    other = (first + 1) % VOCAB
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[first]
    runner = Runner(model, 1, 100)
    found = classify(runner, "a", PROMPT, [first], [other], 4)
    assert found is not None and found.margin == 0 and found.tie


def test_greedy_runs_of_float32_do_not_part() -> None:
    drafter = ModelDrafter(Runner(DRAFTS["noise"], 1, 100))
    found = compare_greedy(Runner(TARGET, 1, 100), drafter, [PROMPT, PROMPT[:6]], 4, 30)
    assert found["divergences"] == [] and found["num_tok"] == 60 and found["bugs"] == 0
    assert 0 < found["accept_frac"] < 1
