"""The comparing scripts from end to end on a tiny pair: a table, a file of figures, exit code 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill.checkpoint import write_draft
from scripts import compare_decoding, policy_replay, window_check
from tests.conftest import make_noisy, make_target, make_tokenizer


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Target, draft and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target, tokenizer = make_target(), make_tokenizer()
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_draft(folder / "draft", make_noisy(target), tokenizer, {"traffic": {}}, dtype="float32", eos_ids=(1, 4))
    rows = [{"id": f"r{i}", "domain": d, "prompt": f"say {i} {d} words"} for i in range(6) for d in ("code", "math")]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    paths = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--prompts", str(folder / "p.jsonl")]
    return [*paths, "--num", "3", "--max-new", "12", "--dtype", "float32"]


@pytest.mark.slow
def test_compare_decoding(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    words = [*options, "--k", "2", "--most", "3", "--self-layers", "2", "--max-prompt", "100", "--out", str(out)]
    assert compare_decoding.main(words) == 0
    found = json.loads(out.read_text())
    assert set(found["arms"]) == {
        "transformers generate", "transformers assisted", "engine baseline", "engine draft k=2",
        "engine draft adaptive<=3", "engine look-up k=4", "engine first 2 layers k=2",
    }  # fmt: skip
    assert all(arm["same_text"] == 1.0 for arm in found["arms"].values())  # greedy, float32
    assert found["prompts"] == 3 and found["settings"]["k"] == "2" and "engine baseline" in capsys.readouterr().out


@pytest.mark.slow
def test_policy_replay(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    assert policy_replay.main([*options, "--domains", "code", "math", "--most", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["streams"]) == {"code", "math", "mixed"} and set(found["costs"]["V_ms"]) >= {"1", "2"}
    assert found["streams"]["mixed"]["answers"] == 6 and found["streams"]["code"]["fixed"]["0"] == 1.0
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"device": "cpu", "shapes": [], "costs": [found["costs"]]}))
    again = [*options, "--domains", "code", "--most", "2", "--plan", str(plan), "--out", str(out)]
    assert policy_replay.main(again) == 0
    assert json.loads(out.read_text())["streams"]["code"] == found["streams"]["code"]  # texts and costs are the same


@pytest.mark.slow
def test_window_check(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = ["--domains", "code", "--recent", "32", "--contexts", "16", "200", "--rounds", "2", "--out", str(out)]
    assert window_check.main([*options, *words]) == 0
    found = json.loads(out.read_text())
    assert set(found["drafts"]) == {"whole", "4 + 32"} and found["prompts"] == 3
    assert found["drafts"]["4 + 32"]["slab_bytes"] < found["drafts"]["whole"]["slab_bytes"]
