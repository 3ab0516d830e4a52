"""Requests in turns, sets, contexts and room."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerFast

from distill.recipe import load_recipe
from distill.schema_eval import Eval, group_of
from engine.warp import Warp
from eval.decoders import EvalRequest
from eval.setup import capacity_of, contexts_of, draft_warp, graph_of, requests_of, sets_of
from tests.eval.test_prompts import recipe_of


def test_requests_are_counted_by_domain_and_group(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    recipe = recipe_of(
        tmp_path,
        {"code": [3, 4, 5, 900], "math": [3, 4]},
        *("traffic.max_prompt_tok=100000", "eval.num_requests=2", "eval.min_requests=2"),
    )
    found = requests_of(recipe, tok_a)
    cells = {(r.domain, r.group) for r in found.requests}
    assert ("code", "short") in cells and ("math", "short") in cells and len(cells) == 3
    assert sum((r.domain, r.group) == ("code", "short") for r in found.requests) == 2
    assert [r.domain for r in found.spare] == ["code"] and not found.choice.left_out
    assert not {r.id for r in found.spare} & {r.id for r in found.requests}


def request(name: str, num: int, domain: str = "code") -> EvalRequest:
    return EvalRequest(name, domain, group_of(num), tuple(range(num)))


def test_sets_are_full_even_with_few_requests() -> None:
    requests = [request(f"c{i}", 10) for i in range(5)] + [request("m0", 10, "math")]
    sets = sets_of(requests, 2, 2)
    assert [s.index for s in sets] == [0, 1, 2, 3] and all(len(s.requests) == 4 for s in sets)
    assert [r.id for r in sets[0].requests] == ["c0", "c1", "c2", "c3"]
    assert [(r.id, r.repeat) for r in sets[2].requests] == [("c4", 0), ("c0", 1), ("c1", 1), ("c2", 1)]
    assert [(r.id, r.repeat) for r in sets[1].requests] == [("m0", 0), ("m0", 1), ("m0", 2), ("m0", 3)]
    # To the engine each time is a request of its own, with its own noise.
    assert [r.name for r in sets[1].requests] == ["m0", "m0#2", "m0#3", "m0#4"]
    assert all(len({(r.domain, r.group) for r in s.requests}) == 1 for s in sets)


def test_every_request_is_in_a_set() -> None:
    """A cell with more requests than the least number of sets holds gets more sets, another does not."""
    requests = [request(f"c{i}", 10) for i in range(9)] + [request(f"m{i}", 10, "math") for i in range(3)]
    sets = sets_of(requests, 2, 2)
    assert [s.requests[0].domain for s in sets] == ["code", "math", "code", "math", "code"]
    assert [s.index for s in sets] == [0, 1, 2, 3, 4] and all(len(s.requests) == 4 for s in sets)
    firsts = [r.id for s in sets for r in s.requests if r.domain == "code" and not r.repeat]
    assert firsts == [f"c{i}" for i in range(9)]
    assert [(r.id, r.repeat) for r in sets[4].requests] == [("c8", 0), ("c0", 1), ("c1", 1), ("c2", 1)]
    assert len(sets_of(requests[:8], 2, 2)) == 2 and len(sets_of(requests[:8], 2, 3)) == 3


def test_contexts_follow_the_groups_and_room_the_longest_prompt() -> None:
    short, medium = [request("a", 100)], [request("b", 2000), request("c", 3000), request("d", 2500)]
    assert contexts_of(short) == [128, 512]
    assert contexts_of([*short, *medium]) == [128, 512, 2500]
    stage = Eval(k=(1, 5), max_new_tok=64, tree_nodes=32)
    assert capacity_of(stage, medium, LlamaConfig(max_position_embeddings=8192)) == 3000 + 64 + 32 + 200
    assert capacity_of(stage, medium, LlamaConfig(max_position_embeddings=3100)) == 3100
    assert capacity_of(Eval(k=(2,), max_new_tok=64), short, LlamaConfig()) == 512 + 64 + 2 + 200


def test_the_report_says_why_nothing_is_captured() -> None:
    recipe = load_recipe("recipes/code.yaml")
    assert graph_of(recipe, "cpu") == (False, "off: no CUDA")
    assert graph_of(recipe, "cuda")[0] and graph_of(recipe, "cuda")[1].startswith("on")
    off = load_recipe("recipes/code.yaml", ("trainer.graph=false",))
    assert graph_of(off, "cuda") == (False, "off: trainer.graph is false")


def test_a_draft_draws_as_the_recipe_says_else_as_was_fitted_for_this_temperature() -> None:
    fitted = {"temperature": {"target": 0.8, "draft": 0.6}}
    assert draft_warp(Eval(temperature=0.8, top_p=0.9, draft_top_p=0.7), fitted) == Warp(0.6, 0, 0.7)
    assert draft_warp(Eval(temperature=1.0), fitted) == Warp(1.0)
    assert draft_warp(Eval(temperature=0.8), {}) == Warp(0.8)
    assert draft_warp(Eval(temperature=0.8, draft_temperature=0.5), fitted) == Warp(0.5)
    assert draft_warp(Eval(), {"temperature": {"target": 0.0, "draft": 0.9}}) == Warp(0.0)
