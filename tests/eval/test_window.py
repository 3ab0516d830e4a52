"""Agreement and step time of windowed drafts."""

from __future__ import annotations

import torch

from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from eval.window import agreement, step_times_ms
from tests.conftest import make_noisy, make_target


def test_agreement_is_the_chains_acceptance_at_every_place() -> None:
    """The target agrees with itself, a window of all tokens with the whole draft; a shortlist counts in token ids."""
    prompt = torch.randint(5, 500, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    (answer,) = Decoder(Runner(make_target(), 1, 100), ()).run([Request("a", tuple(prompt), 30)])
    assert agreement(Runner(make_target(), 1, 100), prompt, answer.tokens) == [True] * 30
    draft = make_noisy(make_target(), 0.1)
    with torch.inference_mode():
        best = make_noisy(make_target(), 0.1)(torch.tensor([[*prompt, *answer.tokens[:-1]]])).logits[0, 59:].argmax(-1)
    want = [a == b for a, b in zip(best.tolist(), answer.tokens, strict=True)]
    assert 0 < sum(want) < 30
    for recent in (None, 95):
        assert agreement(Runner(draft, 1, 100, recent=recent), prompt, answer.tokens) == want
    few = torch.tensor(sorted(set(answer.tokens)))
    assert sum(agreement(Runner(make_target(), 1, 100, few), prompt, answer.tokens)) == 30


def test_step_times_of_every_pair() -> None:
    runners = {"whole": Runner(make_target(), 1, 700), "window": Runner(make_target(), 1, 700, recent=64)}
    times = step_times_ms(runners, (100, 690), rounds=3)
    assert set(times) == {"whole", "window"}
    assert all(set(row) == {100, 690} and min(row.values()) > 0 for row in times.values())
    # The longest step is over slots that a window does not have.
    assert runners["window"].slab.slots <= 64 + 4 + 64 < runners["whole"].slab.slots
