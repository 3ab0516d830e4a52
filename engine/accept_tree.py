"""The acceptance rule over a tree of proposals. Pure functions of probabilities, proposals and uniforms.

Greedy: go down to the child that is the target's argmax, as long as there is one. Sampling: siblings are drawn from the
draft's q without replacement and tried one after the other, each against what the ones before it left of p:

    for each child d of the node, by rank:
        accept d with probability min(1, p(d) / q(d)), and go on from it
        else  p <- norm(max(p - q, 0));  q(d) <- 0, q <- norm(q)
    no child accepted: draw from p

Given the rejected ones, d is a draw from the renormalised q, so each step is the rule of a chain (arXiv 2211.17192) for
the p that is left, and the token that comes out follows the target's p.

Source: Miao et al., "SpecInfer", arXiv 2305.09781 (the residual over siblings); Chen et al., "Sequoia", arXiv
2402.12374, section 3 (without replacement).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.accept import residual
from engine.tree import Tree
from engine.tree_tensors import tree_tensors
from engine.warp import draw


@dataclass(frozen=True)
class Path:
    """What was accepted of a tree.

    Attributes:
        nodes: [B, depth + 1] the path from the root (0) on; the last accepted node is repeated behind its end.
        accepted: [B] proposals on the path.
        final: [B] the correction or bonus token that follows it.
    """

    nodes: Tensor
    accepted: Tensor
    final: Tensor


def accept_tree_greedy(tree: Tree, tokens: Tensor, best: Tensor, levels: Tensor | None = None) -> Path:
    """Follows the child that equals the target's argmax.

    Args:
        tree: T nodes.
        tokens: [B, T] token ids in the target's vocabulary; the root's is the newest token.
        best: [B, T] the target's argmax after each node's path.
        levels: [B] levels of a row's tree that count; None is all.
    """
    table = tree_tensors(tree, tokens.device)
    node = torch.zeros_like(tokens[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    nodes, accepted = [node], torch.zeros_like(node)
    for d in range(tree.max_depth):
        kids = table.children[node]
        agree = (kids >= 0) & (tokens.gather(1, kids.clamp(min=0)) == best.gather(1, node[:, None]))
        alive = alive & agree.any(1)
        alive = alive if levels is None else alive & (d < levels)
        node = torch.where(alive, kids.gather(1, agree.long().argmax(1)[:, None])[:, 0], node)
        accepted = accepted + alive.long()
        nodes.append(node)
    return Path(torch.stack(nodes, 1), accepted, best.gather(1, node[:, None])[:, 0])


def remaining(q: Tensor, fallback: Tensor) -> Tensor:
    """What the next sibling is drawn from: q, or one-hot at `fallback` where q has nothing left.

    A top-p or greedy draft may hold fewer tokens than a node has children. The further ones are deterministic then, and
    a distribution that has all its mass on the proposal is exact as any other.

    Args:
        q: [..., R] with earlier siblings set to 0; need not add up to 1.
        fallback: [...] the column to propose where all is 0.
    """
    certain = torch.zeros_like(q).scatter_(-1, fallback[..., None], 1.0)
    return torch.where((q > 0).any(-1, keepdim=True), q, certain)


def accept_tree_sampled(
    tree: Tree,
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    u_accept: Tensor,
    u_final: Tensor,
    rows: Tensor | None = None,
    levels: Tensor | None = None,
) -> Path:
    """Tries siblings by rank against the residual, goes down where one is accepted.

    Args:
        tree: T nodes, I of them with children, at most b.
        p: [B, T, V] the target's probabilities after each node's path, warped as served.
        q: [B, I, R] what the first child of each inner node was drawn from (the next ones without replacement); None:
            proposals are deterministic.
        tokens: [B, T] token ids in the target's vocabulary; the root's is the newest token.
        u_accept: [B, depth, b] uniforms, by the parent's depth and the child's rank. Siblings need different ones,
            cousins do not: only one of their parents is ever reached.
        u_final: [B, depth + 1] uniforms for the token that follows j accepted ones.
        rows: [R] token id of each column of q; None: R columns are the ids 0..R-1.
        levels: [B] levels of a row's tree that count; None is all.

    Returns:
        the accepted path and the token that follows it.
    """
    table = tree_tensors(tree, tokens.device)
    batch, vocab = tokens.shape[0], p.shape[2]
    node = torch.zeros_like(tokens[:, 0])
    left = p[:, 0]
    walking = torch.ones_like(node, dtype=torch.bool)
    nodes, accepted = [node], torch.zeros_like(node)
    for d in range(tree.max_depth):
        kids = table.children[node]
        chance = None if q is None else _columns(q, table.inner[node], rows, vocab)
        walking = walking if levels is None else walking & (d < levels)
        moved = torch.zeros_like(walking)
        for r in range(kids.shape[1]):
            open_ = walking & ~moved & (kids[:, r] >= 0)
            if not bool(open_.any()):
                break
            token = torch.where(open_, tokens.gather(1, kids[:, r, None].clamp(min=0))[:, 0], 0)[:, None]
            this = _sibling(chance, token, r, left)
            keep = u_accept[:, d, r] * this.gather(1, token)[:, 0].double() < left.gather(1, token)[:, 0].double()
            moved = moved | (open_ & keep)
            lost = (open_ & ~keep)[:, None]
            left = torch.where(lost, residual(left, this), left)
            node = torch.where(open_ & keep, kids[:, r], node)
            chance = None if chance is None else chance.scatter(1, token, 0.0)
        walking = moved
        accepted = accepted + moved.long()
        nodes.append(node)
        here = p.gather(1, node[:, None, None].expand(batch, 1, vocab))[:, 0]
        left = torch.where(moved[:, None], here, left)
    return Path(torch.stack(nodes, 1), accepted, draw(left, u_final.gather(1, accepted[:, None])[:, 0]))


def _columns(q: Tensor, place: Tensor, rows: Tensor | None, vocab: int) -> Tensor:
    """q of one inner node a row [B, I, R] -> [B, V], over the target's vocabulary."""
    here = q.gather(1, place[:, None, None].expand(-1, 1, q.shape[2]))[:, 0]
    wide = torch.zeros(here.shape[0], vocab, dtype=here.dtype, device=here.device)
    if rows is None:
        width = min(vocab, here.shape[1])
        wide[:, :width] = here[:, :width]
    else:
        wide[:, rows] = here
    return wide


def _sibling(chance: Tensor | None, token: Tensor, rank: int, like: Tensor) -> Tensor:
    """The distribution [B, V] that a sibling was drawn from: q without the earlier ones, renormalised."""
    if chance is None:
        return torch.zeros_like(like).scatter_(1, token, 1.0)
    if rank == 0:
        return chance
    this = remaining(chance, token[:, 0])
    return this / this.sum(-1, keepdim=True)
