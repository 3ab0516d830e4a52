"""Names of arms, and the grid that a recipe asks for."""

from __future__ import annotations

from distill.schema_eval import Eval
from engine.tree import Tree
from eval.arms import Arm, grid

TREE = Tree((-1, 0, 0, 1))


def test_names_and_labels() -> None:
    named = {
        Arm("", 0): ("baseline", "no speculation"),
        Arm("code", 2): ("draft:code@k2", "code k=2"),
        Arm("code", 5, "adaptive"): ("draft:code@adaptive5", "code adaptive<=5"),
        Arm("code", 5, "schedule"): ("draft:code@schedule5", "code schedule<=5"),
        Arm("code", 2, tree=TREE): ("draft:code@tree3", "code tree 3"),
        Arm("lookup", 4): ("lookup@k4", "look-up k=4"),
        Arm("self-6", 3): ("self-6@k3", "first 6 layers k=3"),
        Arm("k4", 4, "fixed", "block", None, 0.5, 256): (
            "draft:k4@k4+block+t0.5+recent256",
            "k4 k=4, block rule, draft at 0.5, last 256 tokens",
        ),
    }
    assert {arm: (arm.name, arm.label) for arm in named} == named


def test_only_a_windowed_draft_has_a_runner_of_its_own() -> None:
    assert Arm("code", 2, draft_temperature=0.3).runner == "code"
    assert Arm("code", 2, recent=256).runner == "code+recent256"


def test_the_grid_is_the_old_one_by_default() -> None:
    assert [arm.name for arm in grid(Eval(k=(1, 4)), ["a", "b"])] == [
        *("baseline", "draft:a@k1", "draft:a@k4", "draft:b@k1", "draft:b@k4", "lookup@k4"),
    ]


def test_the_grid_with_everything() -> None:
    stage = Eval(
        k=(1, 4),
        policies=("adaptive", "fixed"),
        rule="block",
        temperature=1.0,
        draft_temperatures=(0.5,),
        windows=(256,),
        self_layers=6,
        lookup=False,
    )
    assert [arm.name for arm in grid(stage, ["a"])] == [
        "baseline",
        *("draft:a@k1+block", "draft:a@k4+block", "draft:a@adaptive4+block"),
        *("draft:a@k1+block+t0.5", "draft:a@k4+block+t0.5", "draft:a@adaptive4+block+t0.5"),
        *("draft:a@k1+block+recent256", "draft:a@k4+block+recent256"),
        *("self-6@k1+block", "self-6@k4+block"),
    ]
    assert len({arm.name for arm in grid(stage, ["a"])}) == 11
