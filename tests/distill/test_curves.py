"""The figure of a run: every domain is in it, also after a resumption."""

from __future__ import annotations

import json
from pathlib import Path

from distill.curves import draw_curves


def test_every_domain_is_drawn_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 2.0 / step} for step in (1, 2, 3, 2, 3, 4)]
    figures = {"val/code/alpha": 0.4, "val/code/speedup": 1.1, "val/math/alpha": 0.3, "val/math/speedup": 0.9}
    rows += [{"step": step, "val/speedup": 1.1, **figures} for step in (2, 4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = draw_curves(tmp_path / "train.jsonl", tmp_path / "curves.svg").read_text()
    assert text.count("<!-- code -->") == text.count("<!-- math -->") == 2
    assert "<!-- predicted end-to-end speedup -->" in text


def test_a_run_without_a_validation_is_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}))
    assert draw_curves(tmp_path / "train.jsonl", tmp_path / "curves.svg").stat().st_size > 1000
