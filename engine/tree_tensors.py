"""A tree's tables as tensors, made once for each device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from engine.tree import Tree


@dataclass(frozen=True)
class TreeTensors:
    """Tables of a tree with T nodes.

    Attributes:
        parents: [T], the root's is 0.
        depth: [T].
        rank: [T].
        ancestors: [T, T] bool.
        children: [T, max(1, branch)] node ids by rank, -1 where there is none.
        inner: [T] place among the nodes that have children; 0 for the others.
    """

    parents: Tensor
    depth: Tensor
    rank: Tensor
    ancestors: Tensor
    children: Tensor
    inner: Tensor


@lru_cache(maxsize=256)
def tree_tensors(tree: Tree, device: torch.device) -> TreeTensors:
    """The tables of a tree on a device."""
    width = max(1, tree.max_branch)
    children = [[*nodes, *[-1] * (width - len(nodes))] for nodes in tree.children]
    inner = [tree.inner.index(node) if nodes else 0 for node, nodes in enumerate(tree.children)]
    return TreeTensors(
        torch.tensor([0, *tree.parents[1:]], device=device),
        torch.tensor(tree.depth, device=device),
        torch.tensor(tree.rank, device=device),
        torch.tensor(tree.ancestors, device=device),
        torch.tensor(children, device=device),
        torch.tensor(inner, device=device),
    )
