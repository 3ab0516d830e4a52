"""python -m scripts.release on a tiny run: a folder that loads and speculates, a card from the report, or nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from distill.checkpoint import write_draft
from distill.models import model_hash
from eval.gate import NoMeasurement, find_draft, find_report, policy_by_batch, policy_by_domain, read_report
from eval.report import build_report, write_report
from eval.servers import llama_cpp, sglang, tensorrt_llm, transformers, vllm
from scripts.release import main
from tests.conftest import make_llama, make_noisy
from tests.eval.rows import make_plan, make_run

NAME = "code-5pct"


def settings(**change: Any) -> dict[str, Any]:
    entry = {
        "name": NAME, "stored_params": 900, "read_params": 600, "stored_frac": 0.09, "read_frac": 0.06, "layers": 2,
        "hidden_size": 64, "head_rows": 512, "draft_temperature": 0.0,
    }  # fmt: skip
    made = {
        "objective": "latency@p50", "min_speedup": 1.05, "min_requests": 5, "bootstrap": 200, "domain": "code",
        "k": [1, 2, 3], "temperature": 0.0, "dtype": "bfloat16", "target": "tiny", "device": "cpu", "drafts": [entry],
    }  # fmt: skip
    return made | change


def report_of(folder: Path, **change: Any) -> dict[str, Any]:
    provenance = {"command": "python -m eval.run /home/me/code.yaml", "time": "2026-01-02T03:04:05Z", "versions": {}}
    report = build_report(make_run(num=6, ks=(1, 2, 3), lookup=False), make_plan(), provenance, settings(**change))
    write_report(folder, report)
    return report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tok_a: PreTrainedTokenizerFast) -> Path:
    """runs/code-5pct/20260101-000000 with its draft and a report that says go; the target beside it."""
    root = tmp_path_factory.mktemp("released")
    target = make_llama()
    target.save_pretrained(root / "target")
    tok_a.save_pretrained(root / "target")
    (root / "target" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# tiny\n")
    (root / "target" / "LICENSE").write_text("Apache License\nVersion 2.0\n")
    run = root / "runs" / NAME / "20260101-000000"
    run.mkdir(parents=True)
    recipe = {
        "name": NAME, "seed": 0, "target": {"model": str(root / "target"), "revision": None},
        "draft": {"num_layers": 2},
        "traffic": {"domain": "code", "train": "/home/me/prompts.jsonl"},
    }  # fmt: skip
    (run / "recipe.json").write_text(json.dumps(recipe))
    command = "python -m distill.train /home/me/code.yaml traffic.train=/home/me/prompts.jsonl"
    (run / "provenance.json").write_text(json.dumps({"command": command, "git": {"commit": "0123abc", "dirty": False}}))
    sha = model_hash(root / "target")
    meta = {
        "target": {"name": recipe["target"]["model"], "revision": None, "sha256": sha},
        "size": {"stored": 900, "read": 600}, "head": {"kind": "full", "size": None, "rank": None},
    }  # fmt: skip
    write_draft(run / "draft", make_noisy(target, 0.1), tok_a, meta, dtype="bfloat16", eos_ids=[1, 4])
    report_of(run / "eval" / "20260101-010000", target_sha256=sha)
    return run


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script sets it for its process; here it is put back."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def released(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release; any attempt to open a connection while it is made is an error."""
    folder = tmp_path_factory.mktemp("out") / "draft"
    with pytest.MonkeyPatch.context() as patch:

        def refuse(self: socket.socket, address: Any) -> None:
            raise AssertionError(f"connection to {address} without --push")

        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        assert main([str(made), "--to", str(folder)]) == 0
    return folder


def test_the_folder_is_whole_and_speculates(released: Path, made: Path) -> None:
    names = {str(p.relative_to(released)) for p in released.rglob("*") if p.is_file()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "draft.json", "README.md",
        "LICENSE", "phase_shares.svg", "gguf/draft-f16.gguf", "gguf/draft-q8_0.gguf", "gguf/target-f16.gguf",
        "gguf/target-q8_0.gguf",
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(released)
    target = AutoModelForCausalLM.from_pretrained(made.parents[2] / "target").eval()
    draft = AutoModelForCausalLM.from_pretrained(released, dtype=torch.float32).eval()
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ids = tokenizer("def add(first, second):", return_tensors="pt")
    plain, assisted = (
        target.generate(**ids, assistant_model=m, do_sample=False, max_new_tokens=24) for m in (None, draft)
    )
    assert torch.equal(plain, assisted)


def test_the_settings_of_the_card_work_as_they_are_printed(
    released: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted beside the release and its target: the program runs, and every file that a command names is there."""
    (tmp_path / released.name).symlink_to(released)
    (tmp_path / "target").symlink_to(made.parents[2] / "target")
    monkeypatch.chdir(tmp_path)
    blocks = dict(re.findall(r"### ([^\n]+)\n\n```\w+\n(.*?)\n```", (released / "README.md").read_text(), re.S))
    exec(blocks["transformers"], {})
    assert capsys.readouterr().out.strip()
    words = shlex.split(blocks["llama.cpp"].replace("\\\n", " "))
    assert all(Path(words[words.index(flag) + 1]).is_file() for flag in ("--model", "--model-draft"))
    words = shlex.split(blocks["vLLM"])
    assert words[:2] == ["vllm", "serve"] and Path(words[2], "config.json").is_file()
    assert Path(json.loads(words[words.index("--speculative-config") + 1])["model"], "config.json").is_file()
    words = shlex.split(blocks["SGLang"].replace("\\\n", " "))
    assert Path(words[words.index("--speculative-draft-model-path") + 1], "config.json").is_file()


def test_draft_json_is_complete(released: Path, made: Path) -> None:
    meta = json.loads((released / "draft.json").read_text())
    report = read_report(find_report(made))
    assert meta["measured"]["device"] == "cpu" and meta["measured"]["verdict"] == "go"
    entry = next(c for c in report["choice"]["ranking"] if c["draft"] == NAME)
    assert (meta["measured"]["k"], meta["measured"]["alpha"]) == (entry["k"], entry["alpha"])
    assert set(meta["policy"]) >= {"code", "math", "qa"} and meta["policy"]["code"]["k"] == entry["k"]
    assert meta["licence"] == {"license": "apache-2.0", "source": "the target's README.md"}
    assert meta["traffic"]["train_sha256"] == {"prompts.jsonl": None}
    assert [f["path"] for f in meta["gguf"]["target"]] == ["gguf/target-f16.gguf", "gguf/target-q8_0.gguf"]
    assert meta["size"] == {"stored": 900, "read": 600} and meta["eos_ids"] == [1, 4]
    assert "/home/me" not in json.dumps(meta) and str(made.parents[2]) not in json.dumps(meta)


def test_the_card_is_valid_and_its_figures_are_the_reports(released: Path, made: Path) -> None:
    text = (released / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert data["license"] == "apache-2.0" and data["library_name"] == "transformers"
    assert {"speculative-decoding", "draft-model"} <= set(data["tags"])
    report = read_report(find_report(made))
    assert report["verdict"]["headline"] in text and "/home/me" not in text
    for cell in report["cells"]:
        if cell["draft"] == NAME and cell["k"] == 3 and cell["group"] == "short":
            assert f"| {cell['latency_speedup']['p50']:.2f}x | " in text
            assert " | ".join(f"{p['A']:.2f}" for p in cell["accept_by_position"]) in text
    assert "`python -m distill.train code.yaml traffic.train=prompts.jsonl`" in text
    for word in (
        "--speculative-config",
        "STANDALONE",
        "assistant_model",
        "--model-draft",
        "DraftTarget",
        "## When not",
    ):
        assert word in text


def test_servers_take_the_measured_k() -> None:
    assert json.loads(vllm("t", "d", 3).split("'")[1]) == {
        "method": "draft_model", "model": "d", "num_speculative_tokens": 3,
    }  # fmt: skip
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in sglang(
        "t", "d", 3
    )
    assert "max_draft_len: 3\n  speculative_model: d\n  max_concurrency: 8" in tensorrt_llm("t", "d", {1: 3, 8: 3})
    assert "max_draft_len: 3" in tensorrt_llm("t", "d", {1: 3, 4: 1, 16: 0})
    assert "draft_len_schedule: {1: 3, 4: 1, 16: 0}" in tensorrt_llm("t", "d", {1: 3, 4: 1, 16: 0})
    nothing = tensorrt_llm("t", "d", {1: 0, 8: 0})
    assert nothing.startswith("# No k pays at the batch sizes that were measured (1, 8)") and "max_draft" not in nothing


def test_a_draft_measured_by_sampling_samples_there_too() -> None:
    """vLLM and llama-server take the draft's most likely tokens unless they are told otherwise."""
    assert json.loads(vllm("t", "d", 3, 0.7).split("'")[1])["draft_sample_method"] == "probabilistic"
    assert llama_cpp("t", "d", 3, 0.7).endswith(" --spec-draft-sampling probabilistic")
    assert "do_sample=True, temperature=0.7, top_k=0" in transformers("t", "d", 3, 0.7)
    for text in (vllm("t", "d", 3), llama_cpp("t", "d", 3), transformers("t", "d", 3)):
        assert "probabilistic" not in text and "do_sample=True" not in text


def test_policies_are_of_this_draft_alone(made: Path) -> None:
    report = read_report(find_report(made))
    like = next(c for c in report["cells"] if c["draft"] == NAME and c["k"] == 3 and c["domain"] == "code")
    policy = policy_by_domain(report, like)
    for domain, entry in policy.items():
        cells = [c for c in report["cells"] if c["draft"] == NAME and c["domain"] == domain]
        best = max(c["latency_speedup"]["objective"] for c in cells if c["latency_speedup"])
        assert entry["speedup"] == best and entry["pays"] == (best >= 1.05 and entry["low"] >= 1)
    assert policy_by_batch(report, like) == {1: policy["code"]["k"]}


def test_the_gate_refuses_and_no_gate_says_so(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_of(tmp_path / "slow", min_speedup=9.0)
    args = [str(made), "--to", str(tmp_path / "out"), "--report", str(tmp_path / "slow"), "--gguf", "none"]
    assert main(args) == 1
    assert "verdict no-go" in (said := capsys.readouterr().err) and "wanted >= 9.00x" in said
    assert not (tmp_path / "out").exists()
    assert main([*args, "--no-gate"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert (
        "Released against the verdict" in text
        and "The verdict is **no-go**" in text
        and "wanted at least 9.00x" in text
    )


def test_a_report_about_another_draft_does_not_count(made: Path) -> None:
    report = read_report(find_report(made))
    meta = json.loads((made / "draft" / "draft.json").read_text())
    assert find_draft(report, meta, (NAME,))["name"] == NAME
    for change, word in (
        ({"name": "other"}, "measured other"),
        ({"stored_params": 901}, "by weights and sizes"),
        ({"weights_sha256": {"model.safetensors": "0"}}, "by weights and sizes"),
    ):
        with pytest.raises(NoMeasurement, match=word):
            find_draft(report | {"drafts": [report["drafts"][0] | change]}, meta, (NAME,))
    renamed = {"name": "renamed", "weights_sha256": meta["weights_sha256"]}
    assert find_draft(report | {"drafts": [report["drafts"][0] | renamed]}, meta, (NAME,))["name"] == "renamed"


def broken(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may damage."""
    run = tmp_path / "runs" / NAME / "1"
    shutil.copytree(made, run)
    return run


def test_refusals_leave_nothing(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = broken(made, tmp_path)
    path = run / "draft" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1]}))
    assert main([str(run)]) == 2
    assert "the target ends a text with [1, 4]" in capsys.readouterr().err
    shutil.rmtree(run / "eval")
    assert main([str(run)]) == 2
    assert "holds no report.json" in capsys.readouterr().err
    assert not [p for p in run.iterdir() if "release" in p.name]


def test_push_is_a_step_of_its_own(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no hub to reach the upload fails, says so, and leaves the release that was made."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    out = tmp_path / "out"
    assert main([str(made), "--to", str(out), "--gguf", "none", "--push", "me/code-draft"]) == 2
    assert (out / "model.safetensors").is_file() and "# code-draft" in (out / "README.md").read_text()
    assert '"model": "me/code-draft"' in (out / "README.md").read_text()
    assert "not pushed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_release_that_is_stopped_leaves_nothing(made: Path, tmp_path: Path) -> None:
    """SIGTERM while the files are being written."""
    child = subprocess.Popen(
        [sys.executable, "-m", "scripts.release", str(made), "--to", str(tmp_path / "out")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.DEVNULL,
    )
    while not list(tmp_path.glob(".out-release-*/gguf/*")) and child.poll() is None:
        time.sleep(0.01)
    child.terminate()
    assert child.wait(120) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_none_is_told_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom scripts.release import main\n"
        f"assert main([r'{tmp_path}']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "no recipe.json: not a run folder" in done.stderr, done.stderr
