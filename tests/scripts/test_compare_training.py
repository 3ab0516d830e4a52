"""Our trainer beside TRL's: one student, the same tokens, scored alike; TRL itself only where an interpreter has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from scripts.compare_training import COLUMNS, CompareError, check_trl, main, table
from tests.distill.test_train import write_world

TRL = os.environ.get("TRL_PYTHON")
OVERRIDES = ["eval.domains=[code]", "distill.temperature=1.0", "draft.head={kind: full}"]


def side(name: str, match: float, **took: Any) -> dict[str, Any]:
    requests = {"a": [10.0, match, match, 0, 0], "b": [10.0, match, match, 0, 0]}
    requests |= {f"{key}@T=1": [20.0, 0, 0, match / 2, match / 2] for key in "ab"}
    return {"name": name, "seed": 0, "requests": requests, **took}


def test_the_table_sets_ours_against_theirs() -> None:
    took = {"steps": 5, "seconds": 10.0, "cpu_s": 20.0, "supervised_tok": 20_000, "peak_bytes": 2e9}
    sides = {
        "ours": side("this trainer", 0.5, **took),
        "trl": side("TRL", 0.3, **took | {"supervised_tok": 1_000, "peak_bytes": 8e9}),
        "student": side("before training", 0.1),
    }
    assert table({"sides": sides}).splitlines()[2:] == [
        "| this trainer | 5 | 20,000 | 2,000 | 1,000 | 2.00 | 0.500 | 0.250 |",
        "| TRL | 5 | 1,000 | 100 | 50 | 8.00 | 0.300 | 0.150 |",
        "| before training |  |  |  |  |  | 0.100 | 0.050 |",
        "| ours against TRL |  |  | 20.0x | 20.0x | 0.25x | +0.200 (+0.200 to +0.200) | +0.100 (+0.100 to +0.100) |",
    ]


def test_an_interpreter_without_trl_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="No such file"):
        check_trl(str(tmp_path / "python"))
    bare = tmp_path / "bare"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S -E -c 'import trl'\n")
    bare.chmod(0o755)
    with pytest.raises(CompareError, match=r"No module named 'trl'.*pip install torch trl"):
        check_trl(str(bare))
    command = ["no-recipe.yaml", "--trl-python", str(bare), "--minutes", "1", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert not (tmp_path / "out").exists()


def test_peak_memory_is_this_process_s_own() -> None:
    grows = """
from scripts.side_ours import peak_bytes
before = peak_bytes()
held = bytearray(200_000_000)
held[::4096] = b"x" * len(held[::4096])
print(before, peak_bytes())
"""
    # A process of its own: this one may have held more before.
    done = subprocess.run([sys.executable, "-c", grows], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after - before > 100_000_000


def test_our_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, out = write_world(tmp_path), tmp_path / "out"
    command = [str(world / "recipe.yaml"), *OVERRIDES, "--minutes", "0.01", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"| {' | '.join(COLUMNS)} |"
    assert [line.split(" | ")[0] for line in printed[2:]] == ["| this trainer", "| before training"]
    found = json.loads((out / "comparison.json").read_text())["sides"]
    assert found["ours"]["supervised_tok"] > 0
    assert found["ours"]["requests"] != found["student"]["requests"]
    assert AutoModelForCausalLM.from_pretrained(out / "ours").config.num_hidden_layers == 2
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert all(row["prompt"] and row["answer"] for row in rows)
    assert main([*command[:1], "distill.nonsense=1", *command[-4:]]) == 2
    capsys.readouterr()
    assert main([*command[:1], *OVERRIDES, "draft.intermediate_size=64", *command[-4:]]) == 2
    assert "give another --out" in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_train_the_same_student(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if TRL is None:
        pytest.skip("TRL_PYTHON names no interpreter with trl, which this project does not depend on")
    world, out = write_world(tmp_path), tmp_path / "out"
    command = [str(world / "recipe.yaml"), *OVERRIDES, "--minutes", "0.02", "--out", str(out), "--sequences", "4"]
    assert main([*command, "--trl-python", TRL]) == 0
    assert "| ours against TRL |" in capsys.readouterr().out
    found = json.loads((out / "comparison.json").read_text())["sides"]
    assert found["trl"]["name"].startswith("TRL ")
    assert found["trl"]["supervised_tok"] > 0
    scores = [found[name]["requests"] for name in ("ours", "trl", "student")]
    assert scores[0] != scores[2] != scores[1]
