"""The hardware check on a machine without a GPU: valid JSON in seconds, everything else skipped with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.hardware_check import NO_CUDA, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: the check would measure it for minutes")
def test_the_check_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "new" / "check.json"
    assert main(["--out", str(out), "--target", "none", "--rounds", "2"]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    parts = report["parts"]
    assert report["problems"] == [] and report["versions"]["torch"] == torch.__version__
    done = {name for name, row in parts.items() if row["status"] == "done"}
    assert done == {"copy bandwidth", "divergence: tiny", "attention", "costs: tiny batch 1"}
    reasons = {row["reason"] for row in parts.values() if row["status"] == "skipped"}
    assert reasons == {NO_CUDA, "--target none"}
    assert all(row["seconds"] >= 0 for row in parts.values())


def test_no_budget_no_parts(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    assert main(["--out", str(out), "--target", "none", "--budget", "0"]) == 0
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert {row["status"] for row in parts.values()} == {"skipped"}
