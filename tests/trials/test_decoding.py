"""Trials of decoding that no other test asks: the block rule's joint distribution, a shortlist's columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.accept import accept_block, accept_sampled
from engine.warp import draw

N = 60_000
P, Q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.6])


def uniforms(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rule", [accept_sampled, accept_block])
def test_two_tokens_in_a_row_follow_the_target(rule: object) -> None:
    """T32 (TOY3): the first two tokens are independent draws from p; weights over 1 in the block rule break that."""
    proposed = draw(Q.expand(N, 2, -1), uniforms(N, 2, seed=0))
    accepted, final = rule(  # type: ignore[operator]
        P.expand(N, 3, -1), Q.expand(N, 2, -1), proposed, uniforms(N, 2, seed=1), uniforms(N, 3, seed=2)
    )
    later = draw(P.expand(N, -1), uniforms(N, seed=3))
    first = torch.where(accepted > 0, proposed[:, 0], final)
    second = torch.where(accepted == 0, later, torch.where(accepted > 1, proposed[:, 1], final))
    joint = torch.bincount(3 * first + second, minlength=9).view(3, 3) / N
    assert torch.allclose(joint, P[:, None] * P, atol=0.008), joint


@pytest.mark.parametrize("rule", [accept_sampled, accept_block])
def test_columns_of_a_shortlist_are_not_ids(rule: object) -> None:
    """T09 (TOY3): q differs between the columns, so that reading another column gives another acceptance."""
    p, rows, q = torch.tensor([0.1, 0.5, 0.2, 0.2]), torch.tensor([1, 3]), torch.tensor([0.2, 0.8])
    proposed = rows[draw(q.expand(N, -1), uniforms(N, seed=4))]
    accepted, final = rule(  # type: ignore[operator]
        p.expand(N, 2, -1), q.expand(N, 1, -1), proposed[:, None], uniforms(N, 1, seed=5), uniforms(N, 2, seed=6), rows
    )
    assert float(accepted.float().mean()) == pytest.approx(0.4, abs=0.008)  # min(.5, .2) + min(.2, .8)
    token = torch.where(accepted == 1, proposed, final)
    assert torch.allclose(torch.bincount(token, minlength=4) / N, p, atol=0.008)
