"""Provenance: JSON-ready, true about this checkout, and free of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from distill.provenance import collect

ROOT = Path(__file__).parents[2]


def test_it_can_be_written_as_json_and_holds_what_a_rerun_needs() -> None:
    found = json.loads(json.dumps(collect(7, "NVIDIA X")))
    assert found["seed"] == 7 and found["device"] == "NVIDIA X"
    assert set(found) == {"git", "versions", "python", "platform", "cpu", "cores", "device", "seed", "command", "time"}
    assert found["versions"]["torch"] and found["versions"]["transformers"]
    assert found["cpu"] and found["cores"]["usable"] >= 1
    assert datetime.fromisoformat(found["time"]).utcoffset().total_seconds() == 0
    assert collect(7)["device"] == "cpu"


def test_the_commit_is_that_of_the_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = collect(0)["git"]
    assert found["commit"] == head.stdout.strip()
    assert isinstance(found["dirty"], bool)


def test_it_imports_no_torch() -> None:
    code = "import sys; from distill.provenance import collect; collect(0); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
