"""What the cost model, or the measured requests, say that each remedy gives. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine import costs as model
from engine.costs import Costs
from engine.tree import build_tree
from eval.facts import Facts, positions, trained, worst

# A tree's gain is computed as if a second candidate took this part of what the first misses; rows do not hold it.
SECOND_TAKES_FRAC = 0.25
# Newest tokens that a windowed draft still sees.
WINDOW_TOK = 256
# Rows that would share one host gap in a batch.
SHARING_ROWS = 4
Gain = Callable[[Facts], float | None]


def changed(facts: Facts, **change: Any) -> float | None:
    """Predicted speedup after the change over that before, minus 1."""
    if facts.costs is None or not positions(facts.cell):
        return None
    return facts.predicted(**change) / facts.predicted() - 1


def cheaper(reading: float = 1.0, **parts: float) -> Gain:
    """Some parts of the cycle, and the draft's reading of the prompt, take a fraction of their time."""
    return lambda f: changed(f, costs=model.scaled(f.costs, **parts), reading=reading) if f.costs else None


def more_accepted(step: float) -> Gain:
    """Every position accepts so much more."""
    return lambda f: changed(f, accept=[min(1.0, c + step) for c in positions(f.cell)])


def best_k(facts: Facts) -> float | None:
    """The best fixed k, or none."""
    if facts.costs is None or not positions(facts.cell):
        return None
    _, best = model.best_k(facts.costs, positions(facts.cell), **facts.cell["request"])
    return max(0.0, best / facts.predicted() - 1)


def smaller_k(facts: Facts) -> float | None:
    """The best smaller fixed k, or none: narrower passes, and none that verifies at all."""
    if facts.costs is None or not positions(facts.cell):
        return None
    ks = [k for k in facts.costs.ks if k < facts.cell["k"]]
    _, best = model.best_k(facts.costs, positions(facts.cell), ks, **facts.cell["request"])
    return max(0.0, best / facts.predicted() - 1)


def off(facts: Facts) -> float | None:
    """No speculation, where that is faster."""
    return max(0.0, 1 / facts.value - 1) if facts.value else None


def off_where_slower(facts: Facts) -> float | None:
    """No speculation for the requests that it made slower: known afterwards, so no policy gives more."""
    pairs = facts.cell["pairs"]
    if not pairs:
        return None
    return sum(p["arm_ms"] for p in pairs) / sum(min(p["arm_ms"], p["base_ms"]) for p in pairs) - 1


def own_k(facts: Facts) -> float | None:
    """For each request the best of the measured arms of this draft, or none: an adaptive policy gives this at most."""
    times = {p["request_id"]: [p["arm_ms"], p["base_ms"]] for p in facts.cell["pairs"]}
    spent = sum(own for own, _ in times.values())
    for cell in facts.siblings:
        for p in cell["pairs"]:
            if p["request_id"] in times:
                times[p["request_id"]].append(p["arm_ms"])
    return spent / sum(min(found) for found in times.values()) - 1 if times else None


def captured(facts: Facts) -> float | None:
    """Draft steps at the captured speed."""
    eager, graph = facts.cell["t_eager_ms"], facts.cell["t_graph_ms"]
    return cheaper(draft=graph / eager)(facts) if eager and graph else None


def half_of(part: str) -> Gain:
    """Half the layers, or half the head: parameters read a token stand for time."""

    def gain(facts: Facts) -> float | None:
        size = facts.size
        if not size.get("read_params") or not size.get("head_rows") or not size.get("hidden_size"):
            return None
        head = min(1.0, size["head_rows"] * size["hidden_size"] / size["read_params"])
        # Of a prompt only the last token goes through the head.
        return (cheaper(draft=1 - 0.5 * head) if part == "head" else cheaper(0.5, draft=0.5 * (1 + head)))(facts)

    return gain


def as_tree(facts: Facts) -> float | None:
    """The best tree with as many nodes as the costs reach, in place of the chain."""
    costs, accept = facts.costs, positions(facts.cell)
    if costs is None or not accept or facts.cell["batch"] > 1:
        return None
    most = min(16, max(costs.V_ms))
    if most < 2:
        return None
    by_rank = [[c, (1 - c) * SECOND_TAKES_FRAC] for c in accept]
    tree = build_tree(
        by_rank, lambda n: model.verify_ms(costs, n), costs.t_ms, most, most, 2, costs.d0_ms + costs.S_ms + costs.H_ms
    )
    request = facts.cell["request"]
    decoding = request["new_tok"] - 1
    base = request["prefill_ms"] + costs.T_ms * decoding
    spent = request["prefill_ms"] + request["draft_prefill_ms"] + decoding / tree.tokens_per_ms
    return max(0.0, base / spent / facts.predicted() - 1)


def windowed(facts: Facts) -> float | None:
    """The draft sees its newest tokens only; what context adds to its step is gone."""
    if facts.surface is None or facts.costs is None or not facts.costs.t_ms:
        return None
    context, batch = facts.cell["context_tok"]["p50"], facts.cell["batch"]
    short, whole = (facts.surface.t.at(c, batch) for c in (min(context, WINDOW_TOK), context))
    return cheaper(draft=short / whole)(facts) if whole else None


def no_prefill(facts: Facts) -> float | None:
    """Prompts whose keys are there already, the target's and the draft's."""
    if facts.costs is None or not positions(facts.cell):
        return None
    kept = {**facts.cell["request"], "prefill_ms": 0.0, "draft_prefill_ms": 0.0}
    accept = positions(facts.cell)
    return model.predicted_speedup(facts.costs, facts.cell["k"], accept, **kept) / facts.predicted() - 1


def domain_gain(facts: Facts) -> float | None:
    """The worst domain at the training domain's acceptance."""
    here, there = trained(facts), worst(facts)
    if facts.costs is None or not here or not there or not there["costs"] or not positions(there):
        return None
    lost = Facts(there, facts.baseline, facts.settings, costs=Costs.from_json(there["costs"]))
    return changed(lost, accept=positions(here))


def own_choice(facts: Facts) -> float | None:
    """The domain that loses most, with its own best arm."""
    return 1 / (1 - facts.domain_regret) - 1 if facts.domain_regret is not None else None
