"""Which prompts are measured: by group, as many as asked for; what is left out and why."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import get_args

import pytest
from transformers import PreTrainedTokenizerFast

from distill import schema_eval
from distill.recipe import Recipe, load_recipe
from distill.schema_eval import GROUPS, group_of
from eval.prompts import Choice, choose_prompts


def recipe_of(tmp_path: Path, lengths: dict[str, list[int]], *overrides: str) -> Recipe:
    """A recipe whose held-out prompts have about so many words."""
    lines = [
        {"prompt": " ".join(f"{domain}{i}x{n}" for n in range(num)), "domain": domain, "id": f"{domain}-{i}"}
        for domain, many in lengths.items()
        for i, num in enumerate(many)
    ]
    (tmp_path / "heldout.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    given = (f"traffic.heldout={tmp_path / 'heldout.jsonl'}", f"eval.domains=[{', '.join(lengths)}]", *overrides)
    return load_recipe("recipes/code.yaml", given)


def test_groups_by_tokens() -> None:
    assert [group_of(n) for n in (1, 1023, 1024, 6143, 6144, 99999)] == [
        *("short", "short", "medium", "medium", "long", "long")
    ]


def test_prompts_that_do_not_fit_are_counted_and_named(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(tmp_path, {"code": [3, 4, 300, 400]}, "traffic.max_prompt_tok=120", "eval.max_new_tok=10")
    out = choose_prompts(recipe, tok_a).left_out["code"]
    assert out["num"] == 2 and sorted(out["ids"]) == ["code-2", "code-3"]
    assert out["limit_tok"] == 120 and out["limit"] == "traffic.max_prompt_tok"
    assert "2 held-out prompts left out" in caplog.text
    out = choose_prompts(recipe, tok_a, 110).left_out["code"]
    assert out["limit_tok"] == 100 and "positions" in out["limit"]
    with pytest.raises(ValueError, match="no held-out prompt of code"):
        choose_prompts(recipe, tok_a, 11)


def test_a_domain_with_fewer_prompts_than_asked_is_said(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    choose_prompts(recipe_of(tmp_path, {"code": [3, 4, 5], "math": [3] * 8}, "eval.num_requests=8"), tok_a)
    assert "code: 3 of 8 prompts of eval.num_requests are there" in caplog.text and "math: 8 of" not in caplog.text


@pytest.mark.parametrize("cut", ["true", "false"])
@pytest.mark.parametrize("positions", [10, 4])
def test_an_answer_as_long_as_the_positions_leaves_no_room(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast, cut: str, positions: int
) -> None:
    recipe = recipe_of(tmp_path, {"code": [3, 300]}, "eval.max_new_tok=10", f"eval.cut_long={cut}")
    with pytest.raises(ValueError, match=rf"eval\.max_new_tok = 10 .* {positions} positions; lower it"):
        choose_prompts(recipe, tok_a, positions)


def test_groups_with_fewer_prompts_than_asked_for_are_told(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(tmp_path, {"code": [3, 4, 5]}, "eval.num_requests={short: 9, long: 5}", "eval.min_requests=2")
    assert choose_prompts(recipe, tok_a).num("code", "short") == 3
    assert "code, short: 3 of 9 prompts of eval.num_requests are there" in caplog.text
    assert "code, long: 0 of 5 prompts of eval.num_requests are there; this group begins at 6144 tokens" in caplog.text
    caplog.clear()
    choose_prompts(
        recipe_of(tmp_path, {"code": [3, 4, 5]}, "eval.num_requests={short: 3}", "eval.min_requests=2"), tok_a
    )
    assert "are there" not in caplog.text


def test_the_recipe_knows_the_groups() -> None:
    assert get_args(schema_eval.Group) == tuple(name for name, _, _ in GROUPS)


def test_each_group_has_its_own_number(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts of a group that the mapping does not name are counted and said; they are no spare ones either."""
    caplog.set_level(logging.INFO)
    short, medium = [3] * 6, [400] * 4
    given = {"code": short + medium, "math": medium}
    room = ("traffic.max_prompt_tok=100000", "eval.min_requests=1")
    found = choose_prompts(recipe_of(tmp_path, given, *room, "eval.num_requests={short: 4, medium: 2}"), tok_a)
    assert {key: len(cell) for key, cell in found.cells.items()} == {
        ("code", "short"): 4, ("code", "medium"): 2, ("math", "medium"): 2,
    }  # fmt: skip
    assert not found.not_asked and len(found.spare) == 4
    found = choose_prompts(recipe_of(tmp_path, given, *room, "eval.num_requests={short: 4}"), tok_a)
    assert {key: len(cell) for key, cell in found.cells.items()} == {("code", "short"): 4}
    assert found.not_asked == {"code": {"medium": 4}, "math": {"medium": 4}} and not found.left_out
    assert {taken.group for taken in found.spare} == {"short"}
    assert "math, medium: 4 held-out prompts left out: eval.num_requests does not name it" in caplog.text
    with pytest.raises(ValueError, match=r"is of a group that eval\.num_requests = \{'long': 4\} names"):
        choose_prompts(recipe_of(tmp_path, given, *room, "eval.num_requests={long: 4}"), tok_a)


def test_prompts_that_do_not_fit_are_cut_and_named(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut prompts keep their ids and are the same each time; only those that are measured are counted."""
    given = {"code": [3, 4, 300, 400, 500], "math": [3]}
    limits = ("traffic.max_prompt_tok=120", "eval.max_new_tok=10", "eval.cut_long=true")
    many, few = (recipe_of(tmp_path, given, *limits, f"eval.num_requests={n}", "eval.min_requests=1") for n in (8, 4))
    found = choose_prompts(many, tok_a)
    assert found == choose_prompts(many, tok_a) and not found.left_out and set(found.cut) == {"code"}
    told = found.cut["code"]
    assert told["num"] == 3 and sorted(told["ids"]) == ["code-2", "code-3", "code-4"]
    assert told["limit_tok"] == 120 and told["limit"] == "traffic.max_prompt_tok"
    assert "code: 3 held-out prompts cut in the middle to 120 tokens (traffic.max_prompt_tok): code-" in caplog.text
    taken = {one.prompt.id: one for one in found.cells["code", "short"]}
    assert set(taken) == {f"code-{i}" for i in range(5)}
    for name in told["ids"]:
        assert 116 <= len(taken[name].ids) <= 120
        text = taken[name].prompt.messages[-1]["content"]
        assert text.startswith(f"{name.replace('-', '')}x0") and text.endswith(str(given["code"][int(name[-1])] - 1))
    assert choose_prompts(few, tok_a).cut["code"]["num"] == sum(
        one.prompt.id in told["ids"] for one in found.cells["code", "short"][:4]
    )


def test_a_cut_that_ends_in_another_group_is_measured_there_or_counted(
    tmp_path: Path, tok_a: PreTrainedTokenizerFast
) -> None:
    """At a limit where a group begins a cut prompt may lie below it: a cut through a character drops the rest."""
    recipe_of(tmp_path, {"code": [600, 700, 800]})
    with (tmp_path / "heldout.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"prompt": "\U0001f98a" * 1500, "domain": "code", "id": "fox"}))

    def choose(asked: str) -> Choice:
        given = (f"traffic.heldout={tmp_path / 'heldout.jsonl'}", "eval.domains=[code]", f"eval.num_requests={asked}")
        limits = ("traffic.max_prompt_tok=1024", "eval.cut_long=true", "eval.min_requests=1")
        return choose_prompts(load_recipe("recipes/code.yaml", (*given, *limits)), tok_a)

    def sizes(found: Choice) -> dict[str, int]:
        return {group: len(cell) for (_, group), cell in found.cells.items()}

    found = choose("{short: 5, medium: 5}")
    assert sizes(found) == {"short": 1, "medium": 3} and found.cut["code"]["num"] == 4 and not found.not_asked
    assert [one.prompt.id for one in found.cells["code", "short"]] == ["fox"]
    found = choose("{medium: 5}")
    assert sizes(found) == {"medium": 3} and found.cut["code"]["num"] == 3 and found.not_asked == {"code": {"short": 1}}


def test_cutting_is_not_advised_where_it_is_on(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    given = {"code": [300, 400]}
    with pytest.raises(ValueError, match=r"has 2 tokens or less .* let prompts be cut"):
        choose_prompts(recipe_of(tmp_path, given, "traffic.max_prompt_tok=2"), tok_a)
    with pytest.raises(ValueError, match="can be cut to 2 tokens or less") as told:
        choose_prompts(recipe_of(tmp_path, given, "traffic.max_prompt_tok=2", "eval.cut_long=true"), tok_a)
    assert "eval.cut_long" not in str(told.value)
