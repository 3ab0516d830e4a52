"""What a plan says before any training: train, do not train, off at a load, what if."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from eval.plan_view import case_of_plan, load_table, verdict, what_if_table
from eval.whatif import parse
from tests.eval.grid import device


def plan(
    slow: float = 1.0, wide: float = 0.35, batches: tuple[int, ...] = (1,), name: str = "recipe"
) -> dict[str, Any]:
    loads = [(c, b) for b in batches for c in (128, 512)]
    costs = [replace(device(c, b, "recipe", slow, wide), draft=name).to_json() for c, b in loads]
    return {"device": "made-up CPU", "num_threads": 2, "dtype": "bfloat16", "shapes": [], "costs": costs}


def text(table: Any) -> str:
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_a_shape_that_no_acceptance_can_save_is_not_trained() -> None:
    said = verdict(plan(slow=12.0), 1.05)
    assert said.startswith("Do not train: even a perfect draft gives 0.")
    assert not verdict(plan(), 1.05).startswith("Do not train")


def test_loads_at_which_even_a_perfect_draft_does_not_pay_are_named() -> None:
    said = verdict(plan(slow=2.5, wide=3.0, batches=(1, 64)), 1.05)
    assert not said.startswith("Do not train") and "Off even for a perfect draft: batch 64 at 128 tokens" in said
    assert "Off even" not in verdict(plan(batches=(1, 4)), 1.05)


def test_what_if_and_loads_are_tables() -> None:
    case = case_of_plan(plan(batches=(1, 4)), 96)
    assert (case.context, case.batch, case.accept) == (128, 1, (0.5,))
    shown = text(what_if_table(case, [parse("draft=0.5"), parse("batch=64")]))
    assert "draft time x 0.5" in shown and "n/a: too far from what was measured" in shown
    assert "By load" in text(load_table(case))


def test_a_race_is_asked_about_its_first_shape() -> None:
    assert case_of_plan(plan(name="4 layers"), 96).surface.draft == "4 layers"
    with pytest.raises(ValueError, match="the plan holds no costs"):
        case_of_plan({"costs": []}, 96)
