"""A draft of random weights, decoding at simulated acceptance: does a request take what the plan's costs predict?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distill.recipe import Recipe
from engine.costs import Costs
from engine.model import Runner
from eval.arms import Arm
from eval.cells import Settings, build_cells
from eval.decoders import EvalRequest, Load
from eval.measure import Bench
from eval.records import measured
from eval.simulated import check

NUM_REQUESTS = 6


def untrained(recipe: Recipe, target: Runner, draft: Runner, name: str, costs: Sequence[Costs]) -> dict[str, Any]:
    """Requests of random tokens, by every draft length of the recipe, at the acceptance of `eval.simulate`.

    Args:
        recipe: its eval stage.
        target, draft: with room for the shortest measured context and the answer.
        name: the draft's in the costs.
        costs: measured at batch 1.

    Returns:
        what `simulated.check` gives, and `accept`.
    """
    stage = recipe.eval
    context = min(c.context for c in costs if c.batch == 1)
    new = max(2, min(stage.max_new_tok, target.max_positions - context - max(stage.k)))
    drawn = torch.Generator().manual_seed(recipe.seed)
    prompts = torch.randint(0, target.config.vocab_size, (NUM_REQUESTS, context), generator=drawn).tolist()
    requests = [EvalRequest(f"random-{i}", "random", "short", tuple(ids)) for i, ids in enumerate(prompts)]
    bench = Bench(target, {name: draft}, Load(new, (), stage.temperature, stage.top_p, stage.top_k, seed=recipe.seed))
    arms = [Arm("", 0), *(Arm(name, k, rule=stage.rule, simulated=stage.simulate) for k in stage.k)]
    rows = measured(bench.measure(requests, arms))
    plan = {"costs": [c.to_json() for c in costs]}
    cells = build_cells(rows, plan, Settings(min_requests=NUM_REQUESTS, bootstrap=100))
    return {"accept": list(stage.simulate), **check(cells, plan)}
