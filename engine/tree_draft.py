"""Proposals in the shape of a tree, from a draft model: one step a level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine import noise
from engine.accept_tree import Path, remaining
from engine.attention import Nodes
from engine.draft import Batch, ModelDrafter
from engine.tree import Tree
from engine.tree_tensors import tree_tensors
from engine.warp import Warp, draw, probabilities


@dataclass(frozen=True)
class TreeProposal:
    """A token for each node.

    Attributes:
        tree: T nodes, I of them with children.
        tokens: [B, T] ids in the target's vocabulary; the root's is the newest token.
        q: [B, I, R] what the children of each inner node were drawn from, without replacement; None where they are the
            most likely ones.
        rows: [R] ids of q's columns; None: ids 0..R-1.
    """

    tree: Tree
    tokens: Tensor
    q: Tensor | None = None
    rows: Tensor | None = None


class TreeDrafter(ModelDrafter):
    """A draft model that also proposes trees.

    The first step reads the two newest tokens, as for a chain. Each further step reads a whole level of the tree, whose
    nodes take the slots root + 1, root + 2, ... of the draft's slab at the positions root + depth; the last level is
    never read. `keep` then moves the accepted path together.
    """

    def propose_tree(self, batch: Batch, tree: Tree) -> TreeProposal:
        """Greedy: the b most likely tokens after each node. Sampling: b draws from q without replacement.

        Args:
            batch: the rows.
            tree: with at least one proposal.

        Raises:
            ValueError: a node has more children than the draft's head has rows.
        """
        run, table = self.runner, tree_tensors(tree, self.runner.device)
        if self._skipped:
            self._catch_up(batch)
        temperature = self._temperature(batch)
        greedy = bool((temperature < 1e-4).all())
        hidden = run.step(batch.last, batch.length - 2, batch.longest)[:, -1:]
        tokens, q = [batch.last[:, 1:]], []
        for d in range(tree.max_depth):
            level, below = tree.level(d), tree.level(d + 1)
            if d:
                nodes = Nodes(batch.length - 1, table.depth, table.ancestors, level.start, level.stop)
                hidden = run.step_nodes(tokens[-1], nodes, batch.longest - 1 + level.stop)
            parents = [node for node in level if tree.children[node]]
            logits = run.logits(hidden[:, [node - level.start for node in parents]])
            branch = max(len(tree.children[node]) for node in parents)
            if branch > logits.shape[-1]:
                raise ValueError(
                    f"the tree has a node with {branch} children; the draft's head has {logits.shape[-1]} rows: "
                    "build the tree with a smaller max_branch"
                )
            if greedy:
                columns = logits.topk(branch, -1).indices
            else:
                warp = self.warp or Warp()
                q.append(probabilities(logits, temperature, warp.top_k, warp.top_p))
                columns = draw_siblings(q[-1], logits, self._uniforms(batch, d, branch))
            place = table.inner[table.parents[below.start : below.stop]] - table.inner[parents[0]]
            tokens.append(run.token(columns[:, place, table.rank[below.start : below.stop]]))
        return TreeProposal(tree, torch.cat(tokens, 1), torch.cat(q, 1) if q else None, run.shortlist)

    def _uniforms(self, batch: Batch, depth: int, branch: int) -> Tensor:
        """[B, branch] for the children of nodes at this depth."""
        purposes = [noise.sibling(noise.DRAFT, rank) for rank in range(branch)]
        return torch.stack([noise.uniform(self.seed, batch.keys, batch.length + depth, p) for p in purposes], 1)

    def keep(self, length: Tensor, path: Path) -> None:
        """Moves the accepted path together in the draft's slab; the last token of it is read again in any case.

        Args:
            length: [B] tokens of each row before the cycle.
            path: what was accepted.
        """
        self.runner.slab.gather_path(length - 1, path.nodes[:, 1:], path.accepted - 1)


def draw_siblings(q: Tensor, logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draws from q without replacement; when q is used up, the most likely token that is left.

    Args:
        q: [B, m, R] probabilities after m nodes.
        logits: [B, m, R] that they come from.
        uniforms: [B, b].

    Returns:
        [B, m, b] columns, all different in a node.
    """
    left, open_, found = q, logits.float(), []
    for u in uniforms.unbind(1):
        column = draw(remaining(left, open_.argmax(-1)), u[:, None].expand(q.shape[:2]))
        found.append(column)
        left = left.scatter(-1, column[..., None], 0.0)
        open_ = open_.scatter(-1, column[..., None], -torch.inf)
    return torch.stack(found, -1)
