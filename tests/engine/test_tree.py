"""Trees and their construction: hand-worked numbers, and every tree of a small size."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.costs import tau_by_position
from engine.tree import MAX_NODES, RankAccept, Tree, acceptance_table, build_tree
from engine.tree_choice import accept_by_rank, beats_chain

# Two children of the root; the first has two, the second one.
FIVE = Tree((-1, 0, 0, 1, 1, 2))


def flat(n: int) -> float:
    return 10.0


def test_tables_of_a_small_tree() -> None:
    assert FIVE.proposals == 5 and FIVE.max_depth == 2 and FIVE.max_branch == 2
    assert FIVE.depth == (0, 1, 1, 2, 2, 2)
    assert FIVE.rank == (0, 0, 1, 0, 1, 0)
    assert FIVE.children == ((1, 2), (3, 4), (5,), (), (), ())
    assert FIVE.inner == (0, 1, 2)
    assert [list(FIVE.level(d)) for d in range(3)] == [[0], [1, 2], [3, 4, 5]]
    seen = [[node for node, on in enumerate(row) if on] for row in FIVE.ancestors]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]


def test_a_chain_is_a_tree() -> None:
    chain = Tree.chain(3)
    assert chain.parents == (-1, 0, 1, 2) and chain.depth == (0, 1, 2, 3) and chain.rank == (0, 0, 0, 0)
    assert chain.ancestors == tuple(tuple(j <= i for j in range(4)) for i in range(4))
    assert Tree.chain(0).parents == (-1,) and Tree.chain(0).max_depth == 0 and Tree.chain(0).inner == ()


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "must be the root"),
        ((0, 0), "must be the root"),
        ((-1, 1), "node 1 has parent 1"),
        ((-1, 0, -1), "node 2 has parent -1"),
        ((-1, 0, 3, 0), "node 2 has parent 3"),
        ((-1, 0, 1, 0), "node 3 has depth 1 after one of depth 2"),
        ((-1, *[0] * (MAX_NODES + 1)), "65 proposals"),
        (tuple(range(-1, 17)), "depth 17"),
    ],
)
def test_bad_parents_are_refused(parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree(parents)


def test_cutting_keeps_a_tree() -> None:
    assert FIVE.cut(5, 2) is FIVE and FIVE.cut(60, 16) is FIVE
    assert FIVE.cut(3, 2).parents == (-1, 0, 0, 1)
    assert FIVE.cut(5, 1).parents == (-1, 0, 0)
    assert FIVE.cut(0, 2).parents == FIVE.cut(5, 0).parents == (-1,)


def expected_tokens(tree: Tree, rank_accept: RankAccept) -> float:
    """Tokens a cycle: the sum over all nodes of the probability that their whole path is accepted (the root's is 1)."""
    table = acceptance_table(rank_accept, max(1, tree.max_depth), max(1, tree.max_branch))
    chance = [1.0]
    for node, parent in enumerate(tree.parents[1:], 1):
        chance.append(chance[parent] * table[tree.depth[parent]][tree.rank[node]])
    return sum(chance)


def test_expected_tokens_are_the_sum_of_path_probabilities() -> None:
    assert expected_tokens(Tree((-1, 0, 0, 1)), [[0.6, 0.2]]) == pytest.approx(1 + 0.6 + 0.2 + 0.36)
    assert expected_tokens(FIVE, [[0.6, 0.2], [0.5, 0.1]]) == pytest.approx(1 + 0.8 + 0.6 * 0.6 + 0.2 * 0.5)
    assert expected_tokens(Tree.chain(4), [[0.7, 0.1]]) == pytest.approx(tau_by_position([0.7] * 4))
    assert expected_tokens(Tree.chain(0), [[0.7]]) == 1.0


def test_best_tree_on_hand_worked_numbers() -> None:
    """Ranks are right in 0.5 and 0.3 of the cases, a pass takes 10 ms, a draft step 1 ms.

    1 node 1.5 / 11; two siblings 1.8 / 11; a chain of two 1.75 / 12; siblings and a grandchild 2.05 / 12.
    """
    two = build_tree([[0.5, 0.3]], flat, 1.0, 2, 2, 2)
    assert two.tree.parents == (-1, 0, 0)
    assert (two.tokens, two.ms) == (pytest.approx(1.8), pytest.approx(11.0))
    three = build_tree([[0.5, 0.3]], flat, 1.0, 3, 2, 2)
    assert three.tree.parents == (-1, 0, 0, 1)
    assert (three.tokens, three.ms) == (pytest.approx(2.05), pytest.approx(12.0))
    assert three.tokens_per_ms == pytest.approx(2.05 / 12)
    # A pass that grows by 8 ms a node pays for one node alone: 1.5 / 19 against 1.8 / 27.
    steep = build_tree([[0.5, 0.3]], lambda n: 10.0 + 8.0 * n, 1.0, 3, 2, 2, overhead_ms=0.0)
    assert steep.tree.parents == (-1, 0)
    # Slow second step: all goes into the first level.
    assert build_tree([[0.5, 0.3, 0.1]], flat, [1.0, 30.0], 5, 4, 3).tree.parents == (-1, 0, 0, 0)
    # The draft is often right at depth 0 alone.
    by_depth = build_tree([[0.6, 0.3], [0.05, 0.01]], flat, 1.0, 4, 3, 2)
    assert by_depth.tree.max_depth == 1


def every_tree(proposals: int) -> list[Tree]:
    """Ordered trees in level order: parents never fall."""
    found: list[tuple[int, ...]] = [(-1,)]
    for node in range(1, proposals + 1):
        found = [(*parents, p) for parents in found for p in range(max(0, parents[-1]), node)]
    return [Tree(parents) for parents in found]


TREES = [tree for n in range(1, 7) for tree in every_tree(n)]


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 6), depth=st.integers(1, 4), branch=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_no_tree_is_better(seed: int, nodes: int, depth: int, branch: int) -> None:
    """Every tree of up to six nodes; acceptances by depth, not sorted by rank."""
    rng = random.Random(seed)
    rows = [[rng.random() for _ in range(branch + 1)] for _ in range(rng.randint(1, depth))]
    accept = [[a / sum(row) for a in row[:branch]] for row in rows]
    steps = [rng.uniform(0, 5) for _ in range(rng.randint(1, depth))]
    verify = [rng.uniform(5, 20) for _ in range(nodes)]
    overhead = rng.uniform(0, 3)
    plan = build_tree(accept, lambda n: verify[n - 1], steps, nodes, depth, branch, overhead)

    def ms(tree: Tree) -> float:
        drafting = sum((steps + [steps[-1]] * tree.max_depth)[: tree.max_depth])
        return drafting + verify[tree.proposals - 1] + overhead

    fitting = [t for t in TREES if t.proposals <= nodes and t.max_depth <= depth and t.max_branch <= branch]
    best = max(expected_tokens(tree, accept) / ms(tree) for tree in fitting)
    assert plan.tree in fitting
    assert plan.tokens == pytest.approx(expected_tokens(plan.tree, accept))
    assert plan.ms == pytest.approx(ms(plan.tree))
    assert plan.tokens_per_ms == pytest.approx(best)


def test_small_trees_are_all_there() -> None:
    assert [len(every_tree(n)) for n in range(1, 6)] == [1, 2, 5, 14, 42]  # Catalan's numbers


def test_one_branch_gives_the_best_chain() -> None:
    accept = [0.8, 0.6, 0.5, 0.3, 0.2]
    plan = build_tree([[a] for a in accept], lambda n: 20.0 + n, 2.0, 5, 5, 1, 1.5)
    rates = [tau_by_position(accept[:k]) / (2.0 * k + 20.0 + k + 1.5) for k in range(1, 6)]
    assert plan.tree == Tree.chain(1 + rates.index(max(rates)))
    assert plan.tokens_per_ms == pytest.approx(max(rates))


def test_a_tree_is_used_only_where_it_wins() -> None:
    wins = beats_chain([[0.5, 0.3]], flat, 1.0, 6, 4, 2)
    assert wins.wins and wins.tree.tokens_per_ms > wins.chain.tokens_per_ms
    assert wins.chain.tree.max_branch == 1
    # A draft that is always right needs no sibling.
    sure = beats_chain([[1.0, 0.0]], lambda n: 10.0 + 0.1 * n, 0.1, 6, 6, 3)
    assert not sure.wins and sure.tree.tree == sure.chain.tree == Tree.chain(6)
    # Ahead, but by less than moving the keys costs, or than the margin asks.
    gain = wins.tree.tokens_per_ms / wins.chain.tokens_per_ms - 1
    assert beats_chain([[0.5, 0.3]], flat, 1.0, 6, 4, 2, margin_frac=gain * 0.9).wins
    assert not beats_chain([[0.5, 0.3]], flat, 1.0, 6, 4, 2, margin_frac=gain * 1.1).wins
    assert not beats_chain([[0.5, 0.3]], flat, 1.0, 6, 4, 2, tree_extra_ms=20.0).wins


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_nodes": 0}, "max_nodes, max_depth, max_branch are 0, 2, 2"),
        ({"max_nodes": 65}, "65, 2, 2"),
        ({"max_depth": 17}, "3, 17, 2"),
        ({"max_branch": 0}, "3, 2, 0"),
        ({"draft_step_ms": -1.0}, "draft_step_ms is -1.0"),
        ({"draft_step_ms": []}, "draft_step_ms is"),
        ({"overhead_ms": float("nan")}, "overhead_ms nan"),
        ({"verify_ms": lambda n: 0.0}, "verify_ms gives"),
        ({"rank_accept": []}, "no acceptance by rank"),
        ({"rank_accept": [[]]}, "no acceptance by rank"),
        ({"rank_accept": [[1.2]]}, "acceptance by rank is"),
        ({"rank_accept": [[0.7, 0.6]]}, "add up to 1"),  # conditional on earlier ranks having failed
    ],
)
def test_bad_costs_are_refused(change: dict, message: str) -> None:
    given_ = {
        "rank_accept": [[0.5, 0.3]],
        "verify_ms": flat,
        "draft_step_ms": 1.0,
        "max_nodes": 3,
        "max_depth": 2,
        "max_branch": 2,
    }
    with pytest.raises(ValueError, match=message):
        build_tree(**{**given_, **change})


def test_measured_acceptance_by_rank() -> None:
    """20 cycles: 10 take rank 0 first (4 of these go on), 5 rank 1 (2 go on), 5 nothing."""
    taken = {(): 5, (0,): 6, (0, 0): 3, (0, 1): 1, (1,): 3, (1, 0): 2}
    rows = accept_by_rank(FIVE, taken)
    # At depth 1, rank 0 was tried after all 15, rank 1 only after the 10 whose parent has two children.
    assert rows == [pytest.approx([0.5, 0.25]), pytest.approx([5 / 15, 1 / 10])]
    assert accept_by_rank(FIVE, {(): 4}) == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="no cycle"):
        accept_by_rank(FIVE, {})
    with pytest.raises(ValueError, match="leaves the tree at depth 1"):
        accept_by_rank(FIVE, {(1, 1): 1})


def test_trees_are_planned_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import engine.tree_choice"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
