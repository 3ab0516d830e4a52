"""A tree is chosen from what was measured, and left out where it does not win."""

from __future__ import annotations

import logging

import pytest

from engine.bench import tree_times
from engine.costs import Costs
from engine.model import Runner
from engine.tree import Tree
from engine.tree_draft import TreeDrafter
from eval.decoders import EvalRequest, Load
from eval.measure import Bench
from eval.trees import find_tree, rank_acceptance
from tests.engine.test_speculate import DRAFTS, TARGET

REQUESTS = [EvalRequest(f"r{i}", "code", "short", tuple(range(3 + i, 12 + 2 * i))) for i in range(3)]


def bench_of(draft: str) -> Bench:
    return Bench(Runner(TARGET, 1, 250), {"d": Runner(DRAFTS[draft], 1, 250)}, Load(30, ()))


def test_acceptance_by_rank_of_the_target_itself_is_all_rank_0() -> None:
    rows, taken = rank_acceptance(bench_of("same"), "d", REQUESTS, 3)
    assert rows[0] == [1.0, 0.0, 0.0, 0.0]
    assert set(taken) == {(0, 0, 0)}


def test_levels_that_were_hardly_judged_are_not_believed() -> None:
    rows, taken = rank_acceptance(bench_of("other"), "d", REQUESTS, 4)
    assert len(rows) < 4 and sum(taken.values()) > 20
    assert all(len(row) == 4 and sum(row) <= 1 for row in rows)


def test_no_prompt_to_measure_on() -> None:
    with pytest.raises(ValueError, match=r"traffic\.num_heldout"):
        rank_acceptance(bench_of("same"), "d", [], 3)


def test_a_perfect_draft_wants_no_tree(caplog: pytest.LogCaptureFixture) -> None:
    costs = Costs(10.0, {k: 10.0 for k in range(4)}, 0.5, context=16)
    with caplog.at_level(logging.INFO):
        found = find_tree(bench_of("same"), "d", REQUESTS, costs, [1, 3], 6)
    assert found.arm is None and not found.about["wins"] and found.about["chain_k"] == 3
    assert "left out" in caplog.text and "tokens in" in caplog.text


def test_a_tree_that_wins_by_the_costs_is_timed_itself() -> None:
    # Verifying is made out to cost nothing more, so any second candidate wins; its own cycle then decides.
    costs = Costs(1e6, {k: 1e6 for k in range(4)}, 1.0, context=16)
    found = find_tree(bench_of("noise"), "d", REQUESTS, costs, [1, 3], 8)
    about = found.about
    assert about["measured_ms"] > 0 and about["measured_chain_ms"] > 0 and about["num_nodes"] <= 8
    rate, chain = about["tokens"] / about["measured_ms"], about["chain_tokens"] / about["measured_chain_ms"]
    assert about["wins"] == (rate > 1.02 * chain) == (found.arm is not None)
    assert found.arm is None or list(found.arm.tree.parents) == about["parents"]  # type: ignore[union-attr]


def test_trees_and_chains_are_timed_together() -> None:
    bench = bench_of("noise")
    drafter = TreeDrafter(bench.drafts["d"])
    trees, chains = tree_times(bench.target, drafter, [Tree.chain(2), Tree((-1, 0, 0))], [1, 2], 16, rounds=2)
    assert len(trees) == 2 and set(chains) == {1, 2}
    assert all(row["wall"] > 0 and row["draft"] > 0 for row in [*trees, *chains.values()])
