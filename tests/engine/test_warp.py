"""Warping order, edges of temperature and top-p, and sampling by one uniform."""

from __future__ import annotations

import pytest
import torch

from engine import noise
from engine.warp import Warp, argmax, draw, probabilities


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}])
def test_t29_bad_temperature_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        Warp(**bad)


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.5])
def test_bad_top_p_is_refused(top_p: float) -> None:
    with pytest.raises(ValueError, match="top_p"):
        Warp(1.0, 0, top_p)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5])
def test_t29_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits = torch.tensor([[[1.0, 30.0, -80.0, 29.0]]])
    probs = probabilities(logits, torch.tensor([temperature]))
    assert probs.tolist() == [[[0.0, 1.0, 0.0, 0.0]]]


def test_rows_of_a_batch_have_their_own_temperature() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0]]]).expand(3, 1, 3)
    probs = probabilities(logits, torch.tensor([0.0, 1.0, 2.0]))
    assert probs[0, 0].tolist() == [0, 0, 1]
    assert torch.allclose(probs[1, 0], torch.softmax(logits[0, 0], -1))
    assert torch.allclose(probs[2, 0], torch.softmax(logits[0, 0] / 2, -1))


def test_top_p_comes_after_temperature() -> None:
    """At temperature 2 the nucleus of 0.6 is larger than at 1: cutting first would keep only one token."""
    logits = torch.tensor([[[2.2, 0.9, 0.4, 0.0]]])
    at_one = torch.softmax(logits[0, 0], -1)
    assert at_one[0] > 0.6
    probs = probabilities(logits, torch.tensor([2.0]), top_p=0.6)
    assert (probs > 0).sum() == 2
    warm = torch.softmax(logits[0, 0] / 2, -1)
    assert torch.allclose(probs[0, 0, :2], warm[:2] / warm[:2].sum())


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    p = torch.tensor([0.5, 0.2, 0.2, 0.1])
    one = torch.tensor([1.0])
    assert (probabilities(p.log()[None, None], one, top_k=1) > 0).tolist() == [[[True, False, False, False]]]
    kept = probabilities(p.log()[None, None], one, top_p=0.6)[0, 0]
    assert (kept > 0).tolist() == [True, True, False, False]
    assert kept.sum() == pytest.approx(1.0)


def test_draw_never_gives_a_token_of_probability_zero() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).expand(3, -1)
    assert draw(probs, torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64)).tolist() == [1, 3, 3]


def test_noise_is_uniform_and_depends_on_every_argument() -> None:
    request = torch.tensor([noise.request_key("a"), noise.request_key("b")])[:, None]
    position = torch.arange(50_000)
    u = noise.uniform(0, request, position, noise.DRAFT)
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u.float(), bins=20, min=0, max=1)
    assert ((counts - 5000).abs() < 5 * 5000**0.5).all()
    others = [
        noise.uniform(1, request, position, noise.DRAFT),
        noise.uniform(0, request, position, noise.ACCEPT),
        noise.uniform(0, request, position + 1, noise.DRAFT),
    ]
    for other in [*others, u.flip(0)]:
        correlation = torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.02
    assert torch.equal(u[1, 7], noise.uniform(0, request[1], torch.tensor([7]), noise.DRAFT)[0])


def test_argmax_is_that_of_torch_ties_included() -> None:
    x = torch.randint(50, (5, 8, 2048), generator=torch.Generator().manual_seed(5)).bfloat16()
    for logits in (x, x[..., :2000], x[0, 0], x[:, 0]):
        assert torch.equal(argmax(logits), logits.argmax(-1))
