"""The acceptance rule over trees, on distributions small enough to enumerate; then the engine's own samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import engine.accept_tree
from engine.accept import accept_sampled, residual
from engine.accept_tree import accept_tree_greedy, accept_tree_sampled, remaining
from engine.model import Runner
from engine.request import Request
from engine.tree import Tree
from engine.tree_cycle import TreeDecoder
from engine.tree_draft import TreeDrafter, draw_siblings
from engine.warp import Warp, probabilities
from tests.engine.test_speculate import DRAFT5, PROMPT, TARGET5, exact_joint, p_value

P = torch.tensor([0.7, 0.2, 0.1, 0.0])
Q = torch.tensor([0.1, 0.3, 0.5, 0.1])
N = 60_000
FAN = Tree((-1, 0, 0, 0))


def uniforms(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def first_token(q: Tensor, proposed: Tensor, soft: bool = True) -> tuple[Tensor, Tensor]:
    """Frequencies of the first token of one-level trees, and how often each rank was accepted."""
    n, width = proposed.shape
    tree = Tree((-1, *[0] * width))
    tokens = torch.cat([torch.zeros(n, 1, dtype=torch.long), proposed], 1)
    chance = q.expand(n, 1, -1) if soft else None
    u_accept, u_final = uniforms(n, 1, width, seed=1), uniforms(n, 2, seed=2)
    path = accept_tree_sampled(tree, P.expand(n, width + 1, -1), chance, tokens, u_accept, u_final)
    taken = tokens.gather(1, path.nodes[:, 1:])[:, 0]
    token = torch.where(path.accepted == 1, taken, path.final)
    by_node = torch.bincount(path.nodes[:, 1], minlength=width + 1)
    return torch.bincount(token, minlength=4) / n, by_node[1:] / n


def siblings(q: Tensor, width: int, seed: int) -> Tensor:
    return draw_siblings(q.expand(N, 1, -1), q.log().expand(N, 1, -1), uniforms(N, width, seed=seed))[:, 0]


def test_greedy_walk_follows_the_argmax() -> None:
    tree = Tree((-1, 0, 0, 1, 1, 2))
    tokens = torch.tensor([[9, 5, 6, 7, 8, 7]]).expand(5, -1)
    best = torch.tensor(
        [
            [5, 8, 0, 1, 2, 3],  # root -> 5 (node 1) -> 8 (node 4)
            [6, 8, 7, 1, 2, 3],  # root -> 6 (node 2) -> 7 (node 5)
            [6, 8, 8, 1, 2, 3],  # root -> 6, whose only child is 7
            [4, 5, 6, 7, 8, 9],  # nothing
            [7, 7, 7, 7, 7, 7],  # 7 is there, but not below the root
        ]
    )
    path = accept_tree_greedy(tree, tokens, best)
    assert path.nodes.tolist() == [[0, 1, 4], [0, 2, 5], [0, 2, 2], [0, 0, 0], [0, 0, 0]]
    assert path.accepted.tolist() == [2, 2, 1, 0, 0]
    assert path.final.tolist() == [2, 3, 8, 4, 7]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_siblings_without_replacement_keep_the_target_distribution(width: int) -> None:
    freq, ranks = first_token(Q, siblings(Q, width, seed=3))
    assert torch.allclose(freq, P, atol=0.007)
    assert freq[3] == 0
    assert ranks[0] == pytest.approx(float(torch.minimum(P, Q).sum()), abs=0.007)


def test_more_siblings_than_the_draft_holds() -> None:
    """q holds two tokens, three are asked for: the third is the most likely one left, and certain."""
    q = torch.tensor([0.0, 0.4, 0.6, 0.0])
    logits = torch.tensor([1.0, 2.0, 2.4, 0.5])
    proposed = draw_siblings(q.expand(N, 1, -1), logits.expand(N, 1, -1), uniforms(N, 3, seed=4))[:, 0]
    assert (proposed[:, 2] == 0).all()
    freq, _ = first_token(q, proposed)
    assert torch.allclose(freq, P, atol=0.007)


def test_deterministic_siblings_are_one_hot() -> None:
    """A greedy draft's ranks are accepted as often as the target draws these tokens."""
    freq, ranks = first_token(Q, torch.tensor([[2, 1, 0]]).expand(N, -1), soft=False)
    assert torch.allclose(freq, P, atol=0.007)
    assert torch.allclose(ranks, torch.tensor([0.1, 0.2, 0.7]), atol=0.007)
    wrong, _ = first_token(Q, torch.tensor([[2, 1, 0]]).expand(N, -1))
    assert not torch.allclose(wrong, P, atol=0.03)


def test_draws_without_replacement_have_the_right_joint_distribution() -> None:
    pairs = siblings(Q, 2, seed=5)
    freq = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).view(4, 4) / N
    want = Q[:, None] * Q / (1 - Q)[:, None] * (1 - torch.eye(4))
    assert torch.allclose(freq, want, atol=0.007)


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_the_rule_is_exact(seed: int, size: int, width: int) -> None:
    """Over all orders of draws, accepted + residual mass is p to 1e-12."""
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.softmax(3 * torch.randn(2, size, generator=g, dtype=torch.float64), -1)).unbind(0)
    last = torch.tensor(size - 1)

    def out(left: Tensor, chance: Tensor, rank: int) -> Tensor:
        if rank == min(width, size):
            return left
        this = remaining(chance, last)
        this = this / this.sum()
        total = torch.zeros_like(p)
        for d in range(size):
            if this[d] > 0:
                keep = (left[d] / this[d]).clamp(max=1)
                total[d] += this[d] * keep
                below = out(residual(left, this), chance.scatter(0, torch.tensor([d]), 0.0), rank + 1)
                total += this[d] * (1 - keep) * below
        return total

    assert torch.allclose(out(p, q, 0), p, rtol=0, atol=1e-12)


def test_a_chain_is_judged_as_by_the_chain_rule() -> None:
    g = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(512, n, 11, generator=g), -1) for n in (5, 4))
    tokens = torch.randint(0, 11, (512, 5), generator=g)
    u_accept, u_final = uniforms(512, 4, seed=1), uniforms(512, 5, seed=2)
    for chance in (q, None):
        accepted, final = accept_sampled(p, chance, tokens[:, 1:], u_accept, u_final)
        path = accept_tree_sampled(Tree.chain(4), p, chance, tokens, u_accept[..., None], u_final)
        assert torch.equal(path.accepted, accepted) and torch.equal(path.final, final)
        assert torch.equal(path.nodes, torch.minimum(torch.arange(5), accepted[:, None]))
        assert set(accepted.tolist()) >= {0, 1, 2}


def test_greedy_rows_through_the_sampling_path() -> None:
    tree = Tree((-1, 0, 0, 1, 1, 2))
    g = torch.Generator().manual_seed(3)
    tokens = torch.tensor([[9, 0, 1, 2, 3, 0]]).expand(64, -1)
    logits = torch.randn(64, 6, 4, generator=g)
    q = torch.softmax(torch.randn(64, 3, 4, generator=g), -1)
    p = probabilities(logits, torch.zeros(64))
    got = accept_tree_sampled(tree, p, q, tokens, uniforms(64, 2, 2, seed=4), uniforms(64, 3, seed=5))
    want = accept_tree_greedy(tree, tokens, logits.argmax(-1))
    for name in ("nodes", "accepted", "final"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_shortlist_columns_are_token_ids() -> None:
    rows = torch.tensor([1, 2])
    q = torch.tensor([0.5, 0.5])
    proposed = rows[siblings(q, 2, seed=8)]
    tokens = torch.cat([torch.zeros(N, 1, dtype=torch.long), proposed], 1)
    tree = Tree((-1, 0, 0))
    shape = P.expand(N, 3, -1)
    path = accept_tree_sampled(
        tree, shape, q.expand(N, 1, -1), tokens, uniforms(N, 1, 2, seed=9), uniforms(N, 2, seed=10), rows
    )
    token = torch.where(path.accepted == 1, tokens.gather(1, path.nodes[:, 1:])[:, 0], path.final)
    assert torch.allclose(torch.bincount(token, minlength=4) / N, P, atol=0.007)


# -- the engine's samples

WIDE = Tree((-1, 0, 0, 0, 1, 1, 2, 3))
DEEP = Tree((-1, 0, 0, 1, 1, 2, 3, 5))
CASES: dict[str, dict] = {
    "draft temperature": {"tree": WIDE, "batch": 300, "samples": 2400, "draft_warp": Warp(0.5)},
    "draft top-p, deep": {"tree": DEEP, "batch": 300, "samples": 2400, "draft_warp": Warp(1.3, 0, 0.7)},
    "greedy draft, target top-p": {
        "tree": WIDE,
        "batch": 300,
        "samples": 2400,
        "draft_warp": Warp(0.0),
        "top_p": 0.8,
    },
    "every token a sibling": {"tree": Tree((-1, 0, 0, 0, 0, 0, 2)), "batch": 300, "samples": 2400},
    "four rows": {"tree": WIDE, "batch": 4, "samples": 400},
    "one row": {"tree": DEEP, "batch": 1, "samples": 150, "draft_warp": Warp(1.4)},
}


def tree_counts(tree: Tree, batch: int, samples: int, draft_warp: Warp | None = None, top_p: float = 1.0) -> Tensor:
    """How often the engine gave each of the 125 continuations, one prefill for all samples."""
    slots = len(PROMPT) + 5 + tree.proposals
    target, draft = Runner(TARGET5, batch, slots), Runner(DRAFT5, batch, slots)
    ids = torch.tensor(PROMPT)
    with torch.inference_mode():
        hidden = target.prefill(ids)[-1]
        draft.prefill(ids)
        for row in range(1, batch):
            target.slab.move_row(0, row, len(ids))
            draft.slab.move_row(0, row, len(ids))
    counts = torch.zeros(125)
    for first in range(0, samples, batch):
        decoder = TreeDecoder(target, (), TreeDrafter(draft, 11, draft_warp), tree, seed=11, top_p=top_p)
        for row in range(batch):
            # Rows ask for 3 to 5 tokens, so that they leave at different times; the first three are compared.
            decoder.resume(Request(f"r{first + row}", PROMPT, 3 + (first + row) % 3, 1.0), hidden)
        while decoder.active:
            for answer in decoder.cycle():
                a, b, c = answer.tokens[:3]
                counts[a * 25 + b * 5 + c] += 1
    return counts


@pytest.mark.parametrize("case", CASES)
def test_samples_follow_the_target_joint_distribution(case: str) -> None:
    assert p_value(tree_counts(**CASES[case]), exact_joint(1.0, CASES[case].get("top_p", 1.0))) > 1e-3


def wrong_no_residual(p: Tensor, q: Tensor) -> Tensor:
    """After a rejection p stays as it was."""
    return p


def wrong_not_renormalised(chance: Tensor | None, token: Tensor, rank: int, like: Tensor) -> Tensor:
    """Later siblings are scored with q as it is after removing the earlier ones, its sum below 1."""
    assert chance is not None
    return chance


@pytest.mark.parametrize(("name", "wrong"), [("residual", wrong_no_residual), ("_sibling", wrong_not_renormalised)])
def test_known_wrong_rules_fail_the_joint_test(name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.accept_tree, name, wrong)
    assert p_value(tree_counts(**CASES["draft temperature"]), exact_joint(1.0, 1.0)) < 1e-6
