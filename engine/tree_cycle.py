"""Speculative decoding with a tree of proposals: the cycle of `engine.speculate` with a tree in place of the chain.

    tokens, q = drafter.propose_tree(tree)               # one draft step a level
    p         = target(all nodes)                        # one pass, each node sees its ancestors
    path, y   = accept_tree(p, q, tokens)                # one path is kept, y follows
    commit    the path and y                             # its keys move together, the rest is overwritten

A tree pays only where measured costs say so: see `engine.tree_choice.beats_chain`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine import noise
from engine.accept import with_room
from engine.accept_tree import Path, accept_tree_greedy, accept_tree_sampled
from engine.attention import Nodes
from engine.clock import Clock
from engine.model import Runner
from engine.request import Answer
from engine.row_state import RowState, move_on
from engine.speculate import Decoder
from engine.tree import Tree
from engine.tree_draft import TreeDrafter, TreeProposal
from engine.tree_tensors import tree_tensors
from engine.warp import argmax, probabilities


class TreeDecoder(Decoder):
    """Decodes with a static tree. A recorded `Cycle` counts levels: proposed is the tree's depth, not its nodes.

    Args:
        target, eos, drafter, seed, top_k, top_p, clock, keep_hidden, stop: as in `Decoder`.
        tree: what is proposed in each cycle; near the end of an answer or of the slots, the part of it that fits.

    Attributes:
        taken: cycles by accepted path (ranks from the root on), whole trees only; `engine.tree_choice.accept_by_rank`
            makes acceptances of them.

    Raises:
        ValueError: a tree without proposals.
    """

    def __init__(
        self,
        target: Runner,
        eos: Iterable[int],
        drafter: TreeDrafter,
        tree: Tree,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        clock: Clock | None = None,
        keep_hidden: bool = False,
        stop: Callable[[list[int]], bool] | None = None,
    ) -> None:
        if tree.proposals == 0:
            raise ValueError("the tree is a root without proposals; use Decoder with k = 0 for the baseline")
        super().__init__(target, eos, drafter, tree.max_depth, seed, top_k, top_p, clock, keep_hidden, stop)
        self.tree, self.tree_drafter = tree, drafter
        self.taken: Counter[tuple[int, ...]] = Counter()

    def _fitting(self, longest: int) -> Tree:
        """The tree, less the levels that no row could use and the nodes that a slab can not hold."""
        useful = max(a.request.max_new - len(a.tokens) for a in self.active) - 1
        room = min(self.tree_drafter.reach(longest), self.target.max_positions - longest)
        return self.tree.cut(max(0, room), max(0, useful))

    @torch.inference_mode()
    def cycle(self) -> list[Answer]:
        """One round over all active rows; returns those that finished."""
        rows, batch = self._start()
        tree = self._fitting(batch.longest)
        if tree.proposals == 0:
            return super().cycle()
        with self.clock.phase("draft"):
            proposal = self.tree_drafter.propose_tree(batch, tree)
        with self.clock.phase("verify"):
            table = tree_tensors(tree, self.target.device)
            nodes = Nodes(batch.length - 1, table.depth, table.ancestors, 0, tree.proposals + 1)
            hidden = self.target.step_nodes(proposal.tokens, nodes, batch.longest + tree.proposals)
            logits = self.target.logits(hidden)
        with self.clock.phase("sampling"):
            levels = with_room(batch.length, rows.limit, tree.max_depth)
            path = self._accept_tree(logits, rows, proposal, levels)
            self.target.slab.gather_path(batch.length - 1, path.nodes[:, 1:], path.accepted)
            self.tree_drafter.keep(batch.length, path)
            along_path = proposal.tokens.gather(1, path.nodes[:, 1:])
            emitted = move_on(rows.last, rows.length, rows.live, along_path, path.accepted, path.final)
            kept, tokens, count = path.accepted.tolist(), emitted.tolist(), levels.tolist()
            ranks = table.rank[path.nodes[:, 1:]].tolist()
        answers = list(self.active)
        along = hidden.gather(1, path.nodes[..., None].expand(-1, -1, hidden.shape[2])) if self.keep_hidden else hidden
        self._record(kept, tokens, count, along)
        if tree is self.tree:
            self.taken.update(
                tuple(ranks[row][: kept[row]]) for row, answer in enumerate(answers) if not self._shortened(answer)
            )
        return self.retire()

    def _shortened(self, answer: Answer) -> bool:
        """Did the end of the text or the length limit, not the target, decide how far this cycle went?"""
        cycle = answer.cycles[-1]
        return cycle.cut or cycle.proposed < self.tree.max_depth

    def _accept_tree(self, logits: Tensor, rows: RowState, proposal: TreeProposal, levels: Tensor) -> Path:
        """The accepted path from logits [B, T, V], at most so many levels [B] deep."""
        tree = proposal.tree
        if rows.draws == "greedy":
            return accept_tree_greedy(tree, proposal.tokens, argmax(logits), levels)
        p = probabilities(logits, rows.temperature, self.top_k, self.top_p)
        keys = rows.keys[:, None]
        ahead = rows.length[:, None] + torch.arange(tree.max_depth + 1, device=p.device)
        purposes = [noise.sibling(noise.ACCEPT, rank) for rank in range(tree.max_branch)]
        u_accept = torch.stack([noise.uniform(self.seed, keys, ahead[:, :-1], purpose) for purpose in purposes], -1)
        u_final = noise.uniform(self.seed, keys, ahead, noise.FINAL)
        return accept_tree_sampled(tree, p, proposal.q, proposal.tokens, u_accept, u_final, proposal.rows, levels)
