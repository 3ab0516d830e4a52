"""Static token trees, and the one that emits most tokens a millisecond at measured costs. No torch.

A tree's node 0 is the root: the newest token of the row, already known. Every other node is a proposal: the draft's
rank-r candidate after its parent's path. A chain of k proposals is the tree without branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.cycle import MAX_K

MAX_NODES = 64  # proposals of a tree
MAX_DEPTH = MAX_K  # as long as the longest chain
# a[d][r] = P(the target's token is the rank-r candidate | its parent, at depth d, was accepted). One row is all depths.
RankAccept = Sequence[Sequence[float]]
Shares = list[list[list[int]]]


@dataclass(frozen=True)
class Tree:
    """A static tree in level order: what is drafted in one step lies together, and any prefix is a tree.

    Attributes:
        parents: of each node; -1 for the root. The order of siblings is their rank.

    Raises:
        ValueError: no root, a parent that does not come first, nodes out of level order, or too many.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError(f"parents are {self.parents}; node 0 must be the root, with parent -1")
        depth = [0]
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; a parent comes before its child: 0..{node - 1}")
            depth.append(depth[parent] + 1)
            if depth[node] < depth[node - 1]:
                raise ValueError(
                    f"node {node} has depth {depth[node]} after one of depth {depth[node - 1]}; sort nodes by depth"
                )
        if self.proposals > MAX_NODES or depth[-1] > MAX_DEPTH:
            raise ValueError(
                f"the tree has {self.proposals} proposals and depth {depth[-1]}; at most {MAX_NODES} and {MAX_DEPTH}"
            )

    @classmethod
    def chain(cls, k: int) -> Tree:
        """k proposals, each the child of the one before."""
        return cls(tuple(range(-1, k)))

    @property
    def proposals(self) -> int:
        """Nodes that are proposed: all but the root."""
        return len(self.parents) - 1

    @property
    def max_depth(self) -> int:
        return self.depth[-1]

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Steps from the root, of each node."""
        found = [0]
        for parent in self.parents[1:]:
            found.append(found[parent] + 1)
        return tuple(found)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node by rank."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return tuple(tuple(nodes) for nodes in found)

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Place of each node among its siblings; 0 for the root."""
        return (0, *(self.children[parent].index(node) for node, parent in enumerate(self.parents[1:], 1)))

    @cached_property
    def ancestors(self) -> tuple[tuple[bool, ...], ...]:
        """[T, T]: is node j on the path from the root to node i, both ends included?"""
        found: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = [False] * len(self.parents) if parent < 0 else list(found[parent])
            row[node] = True
            found.append(row)
        return tuple(tuple(row) for row in found)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Nodes that have children."""
        return tuple(node for node, nodes in enumerate(self.children) if nodes)

    @property
    def max_branch(self) -> int:
        return max(len(nodes) for nodes in self.children)

    def level(self, depth: int) -> range:
        """The nodes of a depth."""
        first = self.depth.index(depth)
        return range(first, first + self.depth.count(depth))

    def cut(self, proposals: int, depth: int) -> Tree:
        """The first nodes of the tree, so that neither bound is passed; the root always stays."""
        kept = [parent for node, parent in enumerate(self.parents) if node <= proposals and self.depth[node] <= depth]
        return self if len(kept) == len(self.parents) else Tree(tuple(kept) or (-1,))


@dataclass(frozen=True)
class TreePlan:
    """A tree and what a cycle with it is predicted to do.

    Attributes:
        tree: the tree.
        tokens: expected emitted tokens a cycle, the correction or bonus token included.
        ms: draft steps, verify pass and overhead of a cycle.
    """

    tree: Tree
    tokens: float
    ms: float

    @property
    def tokens_per_ms(self) -> float:
        return self.tokens / self.ms


def acceptance_table(rank_accept: RankAccept, depth: int, branch: int) -> list[list[float]]:
    """a[d][r], d = 0 for the root's children; the last given depth is held, ranks that were not measured are 0.

    Raises:
        ValueError: nothing given, a probability out of 0..1, or ranks that add up to more than 1.
    """
    rows = [[float(a) for a in row] for row in rank_accept]
    if not rows or not all(rows):
        raise ValueError("no acceptance by rank given; pass at least [[probability of rank 0]]")
    for row in rows:
        # One token follows, so that two ranks can not both be right.
        if not all(0.0 <= a <= 1.0 for a in row) or sum(row) > 1.0 + 1e-9:
            raise ValueError(
                f"acceptance by rank is {row}; each must lie in 0..1 and they add up to 1 at most "
                "(of all cases where the parent was accepted, not only of those where earlier ranks failed)"
            )
    rows = [(row + [0.0] * branch)[:branch] for row in rows]
    return (rows + [rows[-1]] * depth)[:depth]


def build_tree(
    rank_accept: RankAccept,
    verify_ms: Callable[[int], float],
    draft_step_ms: float | Sequence[float],
    max_nodes: int,
    max_depth: int,
    max_branch: int,
    overhead_ms: float = 0.0,
) -> TreePlan:
    """The tree that emits most tokens a millisecond.

    For every depth limit D and size n the best tree is found exactly: a subtree is worth 1 for its top node plus what
    its children are, the rank-r child's times a[d][r]; how the nodes are shared among the ranks is a dynamic program.
    Of all (n, D) the one with the highest tokens / (sum of t_1..t_D + V(n) + overhead) is taken.

    Args:
        rank_accept: rows by depth (the last one is held) of P(the target's token is the rank-r candidate | the parent
            was accepted).
        verify_ms: V(n), milliseconds of a verify pass over n proposals and the newest token.
        draft_step_ms: one draft step over a level, or one figure for each depth (the last one is held).
        max_nodes: proposals at most, 1..64; V must be known up to there.
        max_depth: 1..16.
        max_branch: children of a node at most; 1 gives the best chain.
        overhead_ms: of a cycle: sampling, host gap, d0.

    Returns:
        the tree with its predicted tokens and milliseconds; of equal ones the shallower, then the smaller.

    Raises:
        ValueError: a bound or a cost out of its range.

    Source: the recursion and the choice of (n, D) by time are those of Sequoia, arXiv 2402.12374, section 3.
    """
    if not 1 <= max_nodes <= MAX_NODES or not 1 <= max_depth <= MAX_DEPTH or max_branch < 1:
        raise ValueError(
            f"max_nodes, max_depth, max_branch are {max_nodes}, {max_depth}, {max_branch}; allowed are 1..{MAX_NODES}, "
            f"1..{MAX_DEPTH} and 1 or more"
        )
    steps = [float(t) for t in draft_step_ms] if isinstance(draft_step_ms, Sequence) else [float(draft_step_ms)]
    verify = [float(verify_ms(n)) for n in range(1, max_nodes + 1)]
    if not steps or not all(math.isfinite(t) and t >= 0 for t in [*steps, overhead_ms]):
        raise ValueError(f"draft_step_ms is {draft_step_ms}, overhead_ms {overhead_ms}; they must be finite and >= 0")
    if not all(math.isfinite(v) and v > 0 for v in verify):
        raise ValueError(f"verify_ms gives {verify} for 1..{max_nodes} proposals; all must be finite and above 0")
    table = acceptance_table(rank_accept, max_depth, min(max_branch, max_nodes))
    best: TreePlan | None = None
    for limit in range(1, max_depth + 1):
        drafting = sum((steps + [steps[-1]] * limit)[:limit])
        worth, shares = _solve(table[:limit], max_nodes)
        for n in range(limit, max_nodes + 1):
            ms = drafting + verify[n - 1] + overhead_ms
            if worth[n + 1] > 0 and (best is None or worth[n + 1] / ms > best.tokens_per_ms):
                best = TreePlan(_rebuild(shares, n), worth[n + 1], ms)
    assert best is not None  # one node is always possible
    return best


def _solve(table: list[list[float]], max_nodes: int) -> tuple[list[float], Shares]:
    """Worth of the best tree of exactly s nodes (root included), and shares[d][r][m]: of m nodes for the children of
    rank r and later of a node at depth d, how many the rank-r child's subtree takes.
    """
    none = -math.inf
    worth = [none, 1.0] + [none] * max_nodes  # at the last depth a node stands alone
    shares: Shares = []
    for row in reversed(table):
        later = [0.0] + [none] * max_nodes
        taken: list[list[int]] = []
        for a in reversed(row):
            options = [
                max((a * worth[s] + later[m - s], -s) for s in range(1, m + 1)) if m else (0.0, 0)
                for m in range(max_nodes + 1)
            ]
            later = [value for value, _ in options]
            taken.append([-s for _, s in options])
        shares.append(taken[::-1])
        worth = [none] + [1.0 + value for value in later]
    return worth, shares[::-1]


def _rebuild(shares: Shares, proposals: int) -> Tree:
    """The tree that the shares describe, level by level."""
    parents, level = [-1], [(0, proposals)]
    for by_rank in shares:
        below = []
        for node, left in level:
            for taken in by_rank:
                if left == 0:
                    break
                below.append((len(parents), taken[left] - 1))
                parents.append(node)
                left -= taken[left]
        level = below
    return Tree(tuple(parents))
