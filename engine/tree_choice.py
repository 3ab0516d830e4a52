"""Whether a tree pays: measured acceptance by rank, and the best tree beside the best chain. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.tree import RankAccept, Tree, TreePlan, build_tree


@dataclass(frozen=True)
class TreeChoice:
    """The best tree beside the best chain at the same costs; `wins` says whether the tree is to be used."""

    tree: TreePlan
    chain: TreePlan
    wins: bool


def beats_chain(
    rank_accept: RankAccept,
    verify_ms: Callable[[int], float],
    draft_step_ms: float | Sequence[float],
    max_nodes: int,
    max_depth: int,
    max_branch: int,
    overhead_ms: float = 0.0,
    tree_extra_ms: float = 0.0,
    margin_frac: float = 0.0,
) -> TreeChoice:
    """Whether the best tree beats the best chain at the same costs; it is to be used only where it does.

    Args:
        rank_accept, verify_ms, draft_step_ms, max_nodes, max_depth, max_branch, overhead_ms: as in `build_tree`. With
            measured `Costs` c these are `lambda n: verify_ms(c, n)`, c.t_ms and c.d0_ms + c.S_ms + c.H_ms.
        tree_extra_ms: what a cycle with a tree costs more (walking it, moving the accepted path's keys).
        margin_frac: by how much the tree must be ahead (0.02 is 2%), for what the costs do not resolve.

    Returns:
        both plans and the verdict; a "tree" without branches never wins.
    """
    bounds = (rank_accept, verify_ms, draft_step_ms, max_nodes, max_depth)
    tree = build_tree(*bounds, max_branch, overhead_ms + tree_extra_ms)
    chain = build_tree(*bounds, 1, overhead_ms)
    ahead = tree.tokens_per_ms > chain.tokens_per_ms * (1.0 + margin_frac)
    return TreeChoice(tree, chain, ahead and tree.tree.max_branch > 1)


def accept_by_rank(tree: Tree, taken: Mapping[tuple[int, ...], int]) -> list[list[float]]:
    """Measured acceptance by depth and rank, ready for `build_tree`.

    Args:
        tree: what was proposed.
        taken: cycles by accepted path, a path being the ranks from the root on; () is nothing accepted.

    Returns:
        a[d][r] = accepted rank-r children / accepted parents that had one, up to the last depth that was reached.
        Rows are scaled down to a sum of 1 where different parents had different numbers of children.

    Raises:
        ValueError: no cycle given, or a path that the tree does not have.
    """
    hits = [[0] * tree.max_branch for _ in range(tree.max_depth)]
    tries = [[0] * tree.max_branch for _ in range(tree.max_depth)]
    for path, cycles in taken.items():
        node = 0
        for d in range(len(path) + 1):
            kids = tree.children[node]
            for r in range(len(kids)):
                tries[d][r] += cycles
            if d < len(path):
                if not 0 <= path[d] < len(kids):
                    raise ValueError(
                        f"path {path} leaves the tree at depth {d}: the node there has {len(kids)} children"
                    )
                hits[d][path[d]] += cycles
                node = kids[path[d]]
    rows = [[h / t for h, t in zip(*pair, strict=True) if t] for pair in zip(hits, tries, strict=True)]
    rows = [[a / max(1.0, sum(row)) for a in row] for row in rows if row]
    if not rows:
        raise ValueError("no cycle was measured; decode some requests with the tree first")
    return rows
