"""Ablations: equal steps and answers, resumable, each arm beside the first of its group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.teacher import ResponseDataset
from scripts.ablate import AblateError, load_arms, main
from scripts.ablate_table import alpha, difference, tables
from tests.distill.test_train import write_world

ARMS = """
- {group: loss, arm: forward, seeds: [0, 1]}
- {group: loss, arm: tv, set: ["distill.loss={tv: 1.0}"]}
- {group: temperature, arm: mixed}
- {group: temperature, arm: greedy, keep: {temperature: 0.0}}
- {group: temperature, arm: hot, set: ["responses.temperatures=[1.0]"]}
"""


def line(seed: int, *figures: list[float], read: float = 0.1) -> dict[str, Any]:
    """A line with two greedy and two sampled requests."""
    requests = dict(zip(("a", "b", "a@T=1", "b@T=1"), figures))
    return {"seed": seed, "steps": 5, "supervised_tok": 1000, "read_frac": read, "cpu_s_per_step": 0.5} | {
        "requests": requests
    }


def test_alpha_weighs_requests_by_tokens_and_averages_seeds() -> None:
    lines = [
        line(0, [10, 0.5, 0.4, 0, 0], [30, 0.1, 0.1, 0, 0]),
        line(1, [10, 0.7, 0.4, 0, 0], [30, 0.3, 0.1, 0, 0]),
    ]
    assert alpha(lines, ["a", "b"], 1) == pytest.approx((5 + 7 + 3 + 9) / 80)
    assert alpha(lines[:1], ["a", "b"], 2) == pytest.approx((4 + 3) / 40)


def test_a_difference_is_paired() -> None:
    # The requests differ far more from each other than the arms do, and by the same on each.
    first = [line(0, [10, 0.9, 0, 0, 0], [10, 0.1, 0, 0, 0])]
    arm = [line(0, [10, 0.95, 0, 0, 0], [10, 0.15, 0, 0, 0]), line(5, [10, 0.0, 0, 0, 0], [10, 0.0, 0, 0, 0])]
    gap, ends = difference(arm, first, ["a", "b"], 1)
    assert gap == pytest.approx(0.05)  # seed 5 has nothing to be compared with
    assert ends == pytest.approx((0.05, 0.05))
    with pytest.raises(ValueError, match="no seed in common"):
        difference(arm[1:], first, ["a", "b"], 1)


def test_a_table_leaves_out_what_was_not_run() -> None:
    lines = {
        "x": line(0, [10, 0.5, 0.4, 0, 0], [10, 0.5, 0.4, 0, 0], [20, 0, 0, 0.25, 0.2], [20, 0, 0, 0.25, 0.2]),
        "y": line(0, [10, 0.6, 0.4, 0, 0], [10, 0.6, 0.4, 0, 0], [20, 0, 0, 0.35, 0.2], [20, 0, 0, 0.35, 0.2]),
    }
    text = tables({("loss", "kl"): ["x", "x2"], ("loss", "tv"): ["y"], ("head", "full"): ["z"]}, lines, "@T=1")
    rows = [row for row in text.splitlines() if row.startswith(("| kl", "| tv"))]
    assert rows == [
        "| kl | 1 | 5 | 1,000 | 0.500 |  | 0.400 | 0.250 |  | 0.200 | 10.0% | 0.50 |",
        "| tv | 1 | 5 | 1,000 | 0.600 | +0.100 (+0.100 to +0.100) | 0.400 | 0.350 | +0.100 (+0.100 to +0.100) | 0.200 "
        "| 10.0% | 0.50 |",
    ]
    assert "### head" not in text


def test_arms_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "arms.yaml"
    for text, message in (
        ("- {group: loss, arm: a, sett: []}", "sett"),
        ("- {group: loss}", "arm"),
        ("- {group: loss, arm: a, keep: {domain: code}}", "allowed: temperature, reference"),
        ("- {group: loss, arm: a, seeds: []}", "no seeds"),
        ("loss", "a list of"),
    ):
        path.write_text(text)
        with pytest.raises(AblateError, match=message):
            load_arms(path)
    with pytest.raises(AblateError, match="No such file"):
        load_arms(tmp_path / "none.yaml")


def test_the_arms_of_the_project_are_recipes() -> None:
    from distill.recipe import load_recipe

    root = Path(__file__).parents[2]
    for arm in load_arms(root / "scripts" / "ablations.yaml"):
        load_recipe(root / "recipes" / "code.yaml", ["draft.size_frac=[0.01,0.9]", *arm.set])


def test_arms_train_once_and_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, out = write_world(tmp_path), tmp_path / "out"
    arms = tmp_path / "arms.yaml"
    arms.write_text(ARMS)
    command = [str(world / "recipe.yaml"), "distill.max_steps=4", "eval.domains=[code]", "--arms", str(arms)]
    command += ["responses.temperatures=[0.0,0.7]", "--num-answers", "6", "--out", str(out)]
    assert main([*command, "--minutes", "0"]) == 0
    assert capsys.readouterr().out == "\n"
    assert main(command) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(text) for text in (out / "lines.jsonl").read_text().splitlines()]
    # "mixed" is "forward" with seed 0, and has its line already
    assert [(one["arm"], one["seed"]) for one in lines] == [
        ("forward", 0), ("forward", 1), ("tv", 0), ("greedy", 0), ("hot", 0),
    ]  # fmt: skip
    assert {one["steps"] for one in lines} == {4}
    assert [one["answers"] for one in lines] == [6, 6, 6, 6, 6]
    assert all(name in printed for name in ("| forward | 2 |", "| mixed | 1 |", "| hot | 1 |"))
    assert len(lines[0]["requests"]) == 6  # three greedy, the same three sampled
    hot = ResponseDataset(next(out.glob("answers-*")), 80)
    assert {row.temperature for row in hot.rows} == {1.0}
    assert not (out / "run").exists()
    assert main(command) == 0
    assert capsys.readouterr().out == printed
    assert len((out / "lines.jsonl").read_text().splitlines()) == 5
    assert main([*command, "--group", "loss"]) == 0
    assert "temperature" not in capsys.readouterr().out
    assert main([*command, "--group", "los"]) == 2
    assert main([*command[:1], "--arms", str(arms), "--out", str(tmp_path), "distill.nonsense=1"]) == 2


def test_an_arm_may_have_prompts_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, out, arms = write_world(tmp_path), tmp_path / "out", tmp_path / "arms.yaml"
    rows = [json.loads(text) for text in (world / "train.jsonl").read_text().splitlines()]
    (tmp_path / "other.jsonl").write_text(
        "".join(
            json.dumps(row | {"id": f"other {n}", "prompt": row["prompt"] + " fox"}) + "\n"
            for n, row in enumerate(rows)
        )
    )
    others = f"set: ['traffic.train={tmp_path / 'other.jsonl'}']"
    arms.write_text(f"- {{group: prompts, arm: own}}\n- {{group: prompts, arm: others, {others}}}\n")
    command = [str(world / "recipe.yaml"), "distill.max_steps=4", "eval.domains=[code]", "--out", str(out)]
    command += ["--num-answers", "6", "--arms", str(arms)]
    assert main(command) == 0
    own, other = (json.loads(text) for text in (out / "lines.jsonl").read_text().splitlines())
    assert own["answers"] == other["answers"] == 6 and own["requests"].keys() == other["requests"].keys()
    (written,) = out.glob("answers-*")
    assert all(row.id.startswith("other ") for row in ResponseDataset(written, 80).rows)
    arms.write_text(f"- {{group: prompts, arm: others, {others}, keep: {{temperature: 0.0}}}}\n")
    assert main(command) == 2
    assert "keep is of the recipe's own prompts" in capsys.readouterr().err


def test_an_on_policy_arm_takes_its_on_policy_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, out, arms = write_world(tmp_path), tmp_path / "out", tmp_path / "arms.yaml"
    arms.write_text(
        "- {group: replay, arm: offline}\n"
        "- {group: replay, arm: own, set: ['distill.replay={frac: 0.5, num_prompts: 6}']}\n"
    )
    command = [str(world / "recipe.yaml"), "distill.max_steps=4", "eval.domains=[code]", "--out", str(out)]
    assert main([*command, "--arms", str(arms)]) == 0
    offline, own = (json.loads(text) for text in (out / "lines.jsonl").read_text().splitlines())
    assert offline["steps"] == own["steps"] == 4
    assert offline["requests"] != own["requests"]
    arms.write_text(
        "- {group: rounds, arm: two, set: ['distill.max_steps=8', 'draft.rounds=[{num_layers: 3, frac: 0.5}]']}\n"
    )
    assert main([*command, "--arms", str(arms)]) == 2
    assert "an arm trains one draft" in capsys.readouterr().err
