"""Which tree a draft should propose, if any: acceptance by rank from real text, milliseconds from real cycles."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.bench import interpolate, tree_times
from engine.costs import Costs
from engine.request import Request
from engine.tree import RankAccept, Tree
from engine.tree_choice import TreeChoice, accept_by_rank, beats_chain
from engine.tree_cycle import TreeDecoder
from engine.tree_draft import TreeDrafter
from eval.arms import Arm
from eval.decoders import EvalRequest
from eval.measure import Bench

log = logging.getLogger(__name__)

# Candidates a node in the tree that acceptance is measured with, and in the tree that is looked for.
BRANCH = 4
# Levels of which fewer cycles than this were judged are not told from the level above.
MIN_CYCLES = 20
# By how much a tree must be ahead: costs of cycles are not known better.
MARGIN_FRAC = 0.02


@dataclass(frozen=True)
class TreeFound:
    """What was measured for one draft, and what follows.

    Attributes:
        arm: to be measured with the others; None where the tree does not win.
        about: figures for the report.
    """

    arm: Arm | None
    about: dict[str, Any]


def find_tree(
    bench: Bench, draft: str, requests: Sequence[EvalRequest], costs: Costs, ks: Sequence[int], max_nodes: int
) -> TreeFound:
    """The best tree for a draft, if it beats the best chain by what both were measured to cost.

    Acceptance by rank is measured on `requests` with a tree that has all candidates along the most likely path. The
    tree is then the best at the chain's costs plus what a tree costs more, and is timed itself before it is believed.

    Args:
        bench: whose slabs hold the context of `costs` and 200 tokens more.
        draft: its name.
        requests: some prompts, none of them among those that are measured.
        costs: of the draft at batch 1.
        ks: lengths of chains that are measured; the largest is also the deepest level of a tree.
        max_nodes: proposals at most.

    Raises:
        ValueError: no request.
    """
    depth = max(ks)
    accept, cycles = rank_acceptance(bench, draft, requests, min(depth, 64 // BRANCH))
    drafter, longest = TreeDrafter(bench.drafts[draft], bench.load.seed), max(costs.ks)
    stars = [Tree((-1,) + (0,) * n) for n in sorted({longest, max_nodes}) if n > 0]
    same = Tree.chain(longest)

    def timed(trees: Sequence[Tree], k: int) -> tuple[list[dict[str, float]], dict[str, float]]:
        found, chains = tree_times(bench.target, drafter, trees, [k], costs.context, graph=bench.graph)
        return found, chains[k]

    rows, chain = timed([same, *stars], longest)
    extra_ms = max(0.0, rows[0]["wall"] - chain["wall"])
    table = dict(costs.V_ms)
    if max_nodes > longest:
        table[max_nodes] = table[longest] + max(0.0, rows[-1]["verify"] - rows[1]["verify"])
    rest = costs.d0_ms + costs.S_ms + costs.H_ms
    choice = beats_chain(
        accept, lambda n: interpolate(n, table), costs.t_ms, max_nodes, depth, BRANCH, rest, extra_ms, MARGIN_FRAC
    )
    about = _about(choice, draft, accept, cycles, extra_ms)
    if not choice.wins:
        _say(about, "left out")
        return TreeFound(None, about)
    length = choice.chain.tree.proposals
    (own,), chain = timed([choice.tree.tree], length)
    about["measured_ms"], about["measured_chain_ms"] = own["wall"], chain["wall"]
    rate, chain_rate = choice.tree.tokens / own["wall"], choice.chain.tokens / chain["wall"]
    about["wins"] = rate > chain_rate * (1 + MARGIN_FRAC)
    _say(about, "measured with the other arms" if about["wins"] else "left out, its own cycle takes too long")
    return TreeFound(tree_arm(about), about)


def tree_arm(about: Mapping[str, Any]) -> Arm | None:
    """The arm of a `TreeFound`, from its figures; None where the tree did not win."""
    tree = Tree(tuple(about["parents"]))
    return Arm(about["draft"], tree.max_depth, tree=tree) if about["wins"] else None


def rank_acceptance(
    bench: Bench, draft: str, requests: Sequence[EvalRequest], depth: int
) -> tuple[RankAccept, Mapping[tuple[int, ...], int]]:
    """Acceptance by level and rank, and the cycles by accepted path that it was counted from.

    Raises:
        ValueError: no request.
    """
    if not requests:
        raise ValueError("no prompt left to measure acceptance by rank on; raise traffic.num_heldout")
    # Of each level the most likely node goes on: all candidates after the chain's path.
    parents = [-1]
    for level in range(depth):
        parents += [0 if level == 0 else 1 + BRANCH * (level - 1)] * BRANCH
    tree = Tree(tuple(parents))
    decoder = bench.decoder(Arm(draft, depth, tree=tree))
    assert isinstance(decoder, TreeDecoder)
    for request in requests:
        decoder.admit(Request(request.id, request.ids, bench.load.max_new, bench.load.temperature))
        decoder.retire()
        while decoder.active:
            decoder.cycle()
    reached = [sum(n for path, n in decoder.taken.items() if path[:d] == (0,) * d) for d in range(depth)]
    rows = accept_by_rank(tree, decoder.taken)
    return [row for d, row in enumerate(rows) if d == 0 or reached[d] >= MIN_CYCLES], dict(decoder.taken)


def _about(
    choice: TreeChoice, draft: str, accept: RankAccept, cycles: Mapping[tuple[int, ...], int], extra_ms: float
) -> dict[str, Any]:
    tree, chain = choice.tree, choice.chain
    return {
        "draft": draft,
        "wins": choice.wins,
        "parents": list(tree.tree.parents),
        "num_nodes": tree.tree.proposals,
        "depth": tree.tree.max_depth,
        "tokens": tree.tokens,
        "ms": tree.ms,
        "chain_k": chain.tree.proposals,
        "chain_tokens": chain.tokens,
        "chain_ms": chain.ms,
        "tree_extra_ms": extra_ms,
        "accept_by_rank": [list(row) for row in accept],
        "num_cycles": sum(cycles.values()),
        "measured_ms": None,
        "measured_chain_ms": None,
    }


def _say(about: Mapping[str, Any], outcome: str) -> None:
    ms, chain_ms = about["measured_ms"] or about["ms"], about["measured_chain_ms"] or about["chain_ms"]
    log.info(
        "%s: tree of %d (depth %d) %.2f tokens in %.1f ms, chain of %d %.2f in %.1f ms, a tree costs %.1f ms more; %s",
        *(about["draft"], about["num_nodes"], about["depth"], about["tokens"], ms),
        *(about["chain_k"], about["chain_tokens"], chain_ms, about["tree_extra_ms"], outcome),
    )
