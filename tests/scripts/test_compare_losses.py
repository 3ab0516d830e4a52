"""The comparison of losses: one set of answers, steps by the clock, a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill.recipe import load_recipe
from scripts.compare_losses import fitting_steps, loss_overrides, main, summarise, table
from tests.distill.test_train import write_world


def test_what_a_loss_sets(tmp_path: Path) -> None:
    world = write_world(tmp_path)
    sets = {"tv": {"tv": 1.0}, "{tv: 0.5, jsd: 2.0}": {"tv": 0.5, "jsd": 2.0}, "sampling": {"kl_tv": 1.0}}
    sets |= {"greedy": {"forward_kl": 1.0, "cross_entropy": 0.5}}
    for own in ([], ["distill.loss={forward_kl: 1.0}"], ["distill.objective=sampling"]):
        for given, loss in sets.items():
            recipe = load_recipe(world / "recipe.yaml", [*own, *loss_overrides(given)])
            assert recipe.distill.loss == loss, (own, given)


def test_steps_fit_the_minutes_at_the_median_pace() -> None:
    rows = [{"step_ms": ms} for ms in (9000.0, 9000.0, 9000.0, 100.0, 200.0, 900.0)]
    assert fitting_steps(rows, 1.0) == 300
    assert fitting_steps(rows, 1e-9) == 1


def test_a_line_is_the_best_validation() -> None:
    figures = {f"val/code/{name}": 0.5 for name in ("alpha", "alpha_whole", "overlap", "overlap_whole")}
    rows = [{"step": n, "loss": 1.0, "step_ms": 600.0} for n in range(1, 5)]
    rows += [{"step": 2, "val/speedup": 1.2, **figures}, {"step": 4, "val/speedup": 1.1, **figures}]
    line = summarise("tv", 3, rows)
    assert (line["steps"], line["best_step"], line["minutes"], line["code alpha"]) == (4, 2, 0.04, 0.5)
    assert table([line]).splitlines()[2].startswith("| tv | 3 | 4 | 2 |")


def test_two_losses_share_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = write_world(tmp_path)
    out = tmp_path / "out.json"
    command = [str(world / "recipe.yaml"), "--loss", "forward_kl", "--loss", "kl_tv", "--minutes", "0.005"]
    assert main([*command, "--out", str(out)]) == 0
    lines = json.loads(out.read_text())["lines"]
    assert [line["loss"] for line in lines] == ["forward_kl", "kl_tv"]
    assert "| kl_tv | 0 |" in capsys.readouterr().out
    runs = [path for path in (world / "runs" / "tiny").iterdir() if path.name != "latest"]
    assert len(runs) == 4  # a probe and a run each
    assert len({(run / "responses").resolve() for run in runs}) == 1
    assert main([*command[:1], "--loss", "nonsense", "--minutes", "1"]) == 2
