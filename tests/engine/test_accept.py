"""The acceptance rule on distributions small enough to enumerate (TOY3 of the trials)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.accept import accept_block, accept_greedy, accept_sampled, residual
from engine.warp import draw, probabilities

P = torch.tensor([0.7, 0.2, 0.1])
Q = torch.tensor([0.1, 0.3, 0.6])
N = 200_000


def uniforms(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def first_token(p: Tensor, q: Tensor | None, proposed: Tensor, seed: int = 1) -> tuple[Tensor, float]:
    """Frequencies of the first emitted token, and the acceptance, of one-token blocks."""
    n = proposed.shape[0]
    probs = p.expand(n, 2, -1)
    accepted, final = accept_sampled(
        probs,
        None if q is None else q.expand(n, 1, -1),
        proposed[:, None],
        uniforms(n, 1, seed=seed),
        uniforms(n, 2, seed=seed + 1),
    )
    token = torch.where(accepted == 1, proposed, final)
    return torch.bincount(token, minlength=len(p)) / n, float(accepted.float().mean())


def test_rule_gives_the_target_distribution_and_the_overlap_as_acceptance() -> None:
    proposed = draw(Q.expand(N, -1), uniforms(N, seed=5))
    freq, alpha = first_token(P, Q, proposed)
    assert torch.allclose(freq, P, atol=0.004)
    assert alpha == pytest.approx(0.40, abs=0.004)


def test_t30_draft_temperature_is_in_q() -> None:
    logits = Q.log()[None, None]
    q = probabilities(logits, torch.tensor([0.5]))[0, 0]
    assert torch.allclose(q, torch.tensor([0.0217, 0.1957, 0.7826]), atol=1e-4)
    proposed = draw(q.expand(N, -1), uniforms(N, seed=6))
    freq, alpha = first_token(P, q, proposed)
    assert torch.allclose(freq, P, atol=0.004)
    assert alpha == pytest.approx(0.3174, abs=0.004)
    # The known mistake: q at temperature 1 in the ratio biases the output.
    wrong, _ = first_token(P, Q, proposed)
    assert torch.allclose(wrong, torch.tensor([0.739, 0.130, 0.130]), atol=0.005)
    assert not torch.allclose(wrong, P, atol=0.03)


def test_t30_draft_top_p_is_in_q() -> None:
    q = probabilities(Q.log()[None, None], torch.tensor([1.0]), top_p=0.85)[0, 0]
    assert q[0] == 0 and q[1:].sum() == pytest.approx(1.0)
    freq, _ = first_token(P, q, draw(q.expand(N, -1), uniforms(N, seed=7)))
    assert torch.allclose(freq, P, atol=0.004)


def test_t31_deterministic_proposals_are_one_hot() -> None:
    proposed = torch.full((N,), 2)
    freq, alpha = first_token(P, None, proposed)
    assert torch.allclose(freq, P, atol=0.004)
    assert alpha == pytest.approx(0.1, abs=0.004)
    wrong, _ = first_token(P, Q, proposed)  # a greedy draft scored with its soft q
    assert torch.allclose(wrong, torch.tensor([0.833, 0.0, 0.167]), atol=0.005)


def test_t33_greedy_target_through_the_sampling_path() -> None:
    logits = torch.randn(64, 2, 512, generator=torch.Generator().manual_seed(0))
    p = probabilities(logits, torch.zeros(64))
    best = logits.argmax(-1)
    proposed = torch.where(torch.arange(64) % 2 == 0, best[:, 0], (best[:, 0] + 1) % 512)
    q = torch.softmax(torch.randn(64, 1, 512, generator=torch.Generator().manual_seed(1)), -1)
    accepted, final = accept_sampled(p, q, proposed[:, None], uniforms(64, 1, seed=3), uniforms(64, 2, seed=4))
    assert torch.equal(accepted, (torch.arange(64) % 2 == 0).long())
    assert torch.equal(final, torch.where(accepted == 1, best[:, 1], best[:, 0]))


@given(st.integers(0, 10_000), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_residual_identity(seed: int, size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(4 * torch.randn(size, generator=g, dtype=torch.float64), -1)
    q = torch.softmax(4 * torch.randn(size, generator=g, dtype=torch.float64), -1)
    overlap = torch.minimum(p, q)
    assert torch.allclose(overlap + (1 - overlap.sum()) * residual(p, q), p, rtol=0, atol=1e-12)


def test_residual_of_equal_distributions_is_the_distribution() -> None:
    assert torch.equal(residual(P, P), P)


def test_shortlist_columns_are_token_ids_and_missing_tokens_stay_reachable() -> None:
    p = torch.tensor([0.2, 0.1, 0.3, 0.15, 0.25])
    rows = torch.tensor([1, 3])
    q = torch.tensor([0.5, 0.5])
    proposed = rows[draw(q.expand(N, -1), uniforms(N, seed=8))]
    accepted, final = accept_sampled(
        p.expand(N, 2, -1),
        q.expand(N, 1, -1),
        proposed[:, None],
        uniforms(N, 1, seed=9),
        uniforms(N, 2, seed=10),
        rows=rows,
    )
    token = torch.where(accepted == 1, proposed, final)
    assert torch.allclose(torch.bincount(token, minlength=5) / N, p, atol=0.004)


def test_a_row_without_proposals_draws_from_p_not_from_the_residual() -> None:
    count = torch.zeros(N, dtype=torch.long)
    accepted, final = accept_sampled(
        P.expand(N, 2, -1),
        None,
        torch.zeros(N, 1, dtype=torch.long),
        uniforms(N, 1, seed=1),
        uniforms(N, 2, seed=2),
        count=count,
    )
    assert int(accepted.sum()) == 0
    assert torch.allclose(torch.bincount(final, minlength=3) / N, P, atol=0.004)


def test_greedy_rule_takes_the_longest_agreeing_prefix() -> None:
    best = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4]])
    proposed = torch.tensor([[5, 6, 7], [5, 9, 7], [9, 2, 3]])
    accepted, final = accept_greedy(proposed, best)
    assert accepted.tolist() == [3, 1, 0]
    assert final.tolist() == [8, 6, 1]
    accepted, final = accept_greedy(proposed, best, torch.tensor([2, 3, 3]))
    assert accepted.tolist() == [2, 1, 0]
    assert final.tolist() == [7, 6, 1]


def table(seed: int, vocab: int, k: int, sharp: float) -> list[Tensor]:
    """Conditional distributions after every text of up to k tokens: level i is [V] * i + [V]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.softmax(sharp * torch.randn([vocab] * (i + 1), generator=generator), -1) for i in range(k + 1)]


def blocks(vocab: int, k: int, num: int, shortlist: Tensor | None = None) -> tuple[Tensor, ...]:
    """Many blocks: p [N, k+1, V], q [N, k, R] along the drafted texts, and the texts [N, k]."""
    target, draft = table(1, vocab, k, 1.0), table(2, vocab, k, 1.0)
    if shortlist is not None:
        draft = [level[..., shortlist] / level[..., shortlist].sum(-1, keepdim=True) for level in draft]
    ids = torch.arange(vocab) if shortlist is None else shortlist
    at: tuple[Tensor, ...] = ()
    p, q, tokens = [], [], []
    for i in range(k + 1):
        p.append(target[i][at].expand(num, vocab))
        if i < k:
            here = draft[i][at].expand(num, len(ids))
            column = draw(here, uniforms(num, seed=50 + i))
            q.append(here)
            tokens.append(ids[column])
            at = (*at, ids[column])
    return torch.stack(p, 1), torch.stack(q, 1), torch.stack(tokens, 1)


@pytest.mark.parametrize("shortlist", [None, torch.tensor([0, 2])])
def test_block_rule_keeps_the_first_token_and_accepts_more(shortlist: Tensor | None) -> None:
    """Many blocks of k = 3 over V = 3: the first token out follows p. The joint test of the engine sees the rest."""
    num, k, vocab = 200_000, 3, 3
    p, q, tokens = blocks(vocab, k, num, shortlist)
    u_accept, u_final = uniforms(num, k, seed=8), uniforms(num, k + 1, seed=9)
    taken = {}
    for rule in (accept_sampled, accept_block):
        accepted, final = rule(p, q, tokens, u_accept, u_final, shortlist)
        taken[rule] = accepted.double().mean()
        out = torch.cat([tokens, final[:, None]], 1).scatter(1, accepted[:, None], final[:, None])
        target = table(1, vocab, k, 1.0)
        for first in range(vocab):
            share = (out[:, 0] == first).double().mean()
            assert share == pytest.approx(float(target[0][first]), abs=4 / num**0.5), rule
    assert taken[accept_block] > taken[accept_sampled]


def test_block_rule_by_exact_sums() -> None:
    """P(block keeps i, then token) summed over drafts gives the target's joint: V = 2, k = 2, all sums exact."""
    vocab, k = 2, 2
    target, draft = table(3, vocab, k, 1.5), table(4, vocab, k, 1.5)
    texts = torch.cartesian_prod(*[torch.arange(vocab)] * k)
    p = torch.stack([torch.stack([target[i][tuple(t[:i])] for i in range(k + 1)]) for t in texts])
    q = torch.stack([torch.stack([draft[i][tuple(t[:i])] for i in range(k)]) for t in texts])
    weight = q.gather(2, texts[..., None])[..., 0].prod(1)  # P(this text was drafted)
    # The rule is a step function of its uniforms: a fine midpoint grid integrates it up to its own step.
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    first = torch.zeros(vocab, dtype=torch.float64)
    for n, text in enumerate(texts):
        u = torch.cartesian_prod(grid, grid)
        final = torch.full((len(u), k + 1), 0.5, dtype=torch.float64)
        args = (p[n].expand(len(u), -1, -1), q[n].expand(len(u), -1, -1), text.expand(len(u), -1))
        accepted, _ = accept_block(*args, u, final)
        kept = (accepted >= 1).double().mean()
        first[text[0]] += weight[n] * kept
        left = (p[n, 0] - q[n, 0]).clamp(min=0)
        first += weight[n] * (1 - kept) * left / left.sum()
    assert torch.allclose(first, target[0].double(), atol=5e-3)


def test_block_rule_of_one_proposal_is_the_token_rule() -> None:
    p, q, tokens = blocks(4, 1, 5000)
    u_accept, u_final = uniforms(5000, 1, seed=1), uniforms(5000, 2, seed=2)
    for one, other in zip(
        accept_block(p, q, tokens, u_accept, u_final), accept_sampled(p, q, tokens, u_accept, u_final)
    ):
        assert torch.equal(one, other)


def test_block_rule_with_ragged_counts_and_one_hot_drafts() -> None:
    """A row with no real proposal draws from p; equal models keep everything; a draft of certain tokens is exact."""
    p, _, tokens = blocks(4, 3, 4000)
    u_accept, u_final = uniforms(4000, 3, seed=3), uniforms(4000, 4, seed=4)
    none = torch.zeros(4000, dtype=torch.long)
    accepted, final = accept_block(p, None, tokens, u_accept, u_final, None, none)
    assert accepted.sum() == 0 and torch.equal(final, draw(p[:, 0], u_final[:, 0]))
    accepted, _ = accept_block(p, p[:, :3], draw(p[:, :3], uniforms(4000, 3, seed=5)), u_accept, u_final)
    assert (accepted == 3).all()
    one = torch.ones(4000, dtype=torch.long)
    accepted, final = accept_block(p, None, tokens * 0, u_accept, u_final, None, one)
    out = torch.where(accepted > 0, 0, final)
    shares = torch.bincount(out, minlength=4) / 4000
    assert torch.allclose(shares.double(), p[0, 0].double(), atol=0.04) and accepted.max() == 1
