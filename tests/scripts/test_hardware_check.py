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


@pytest.mark.parametrize("option", ["--budget=-1", "--budget=nan", "--budget=inf", "--rounds=0", "--rounds=-3"])
def test_odd_numbers_are_refused(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(tmp_path / "check.json"), "--target", "none", option])
    assert stop.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_used_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "check.json")
    for arguments, said in (
        (["--out", str(tmp_path), "--target", "none"], "is a folder"),
        (["--out", str(tmp_path / "file" / "check.json"), "--target", "none"], "file"),
        (["--out", out, "--target", str(tmp_path)], "no config.json"),
        (["--out", out, "--target", "no-such-model"], "neither a bundled name"),
        (["--out", out, "--target", "none", "--draft", str(tmp_path)], "not a finished draft folder"),
    ):
        assert main(arguments) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and said in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
