"""Every command: wrong words, wrong files and damaged ones give one message and exit code 2, before a model loads."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import scripts
from distill.checkpoint import write_draft
from distill.models import model_hash
from eval.report import build_report
from eval.resume import PROGRESS, REPORT, ROWS, RUN, Progress
from eval.rowfile import append_rows
from tests.conftest import make_noisy, make_target, make_tokenizer
from tests.distill.test_train import write_world
from tests.eval.grid import device
from tests.eval.rows import make_plan, make_run
from tests.eval.test_report import PROVENANCE, settings
from tests.scripts.test_release import made, offline  # noqa: F401 - a run that can be released
from tests.trials.test_fuzz import SEED, Tally, damage, edit_json, times

COMMANDS = ("distill.train", "eval.plan", "eval.run", "eval.serving")
SCRIPTS = tuple(
    f"scripts.{found.name}"
    for found in pkgutil.iter_modules(scripts.__path__)
    if not found.name.startswith("side_")  # started by compare_training alone
    and "def main(" in (Path(scripts.__path__[0]) / f"{found.name}.py").read_text(encoding="utf-8")
)
NOWHERE = "http://127.0.0.1:9"


def entry(name: str) -> Callable[[list[str]], int]:
    return importlib.import_module(name).main  # type: ignore[no-any-return]


def run(name: str, words: list[str]) -> int:
    """The exit code, whichever way the command gives it."""
    try:
        return entry(name)(words)
    except SystemExit as end:
        return int(end.code or 0)


def edit_config(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its target and prompts, a draft, a run folder, and files that are none of them."""
    folder = write_world(tmp_path_factory.mktemp("world"))
    meta = {"target": {"sha256": model_hash(folder / "target")}, "traffic": {}}
    write_draft(folder / "draft", make_noisy(make_target()), make_tokenizer(), meta, dtype="float32", eos_ids=(1, 4))
    for name in ("cut", "negative"):
        shutil.copytree(folder / "draft", folder / name)
    shutil.copytree(folder / "target", folder / "cut_target")
    for name in ("cut", "cut_target"):
        weights = folder / name / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    edit_config(folder / "negative", num_hidden_layers=-3)
    (folder / "list.json").write_text("[1]")
    (folder / "cut.json").write_text('{"format": 2, "cells": [')
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "empty").mkdir()
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    return folder


WRONG: tuple[tuple[str, str, str], ...] = (
    ("distill.train", "none.yaml", "cannot be read"),
    ("distill.train", "{w}", "cannot be read"),
    ("distill.train", "{w}/binary.yaml", "cannot be read"),
    ("distill.train", "{w}/recipe.yaml distill.lr", "distill.lr"),
    ("distill.train", "{w}/recipe.yaml distill.lr=fast", "distill.lr"),
    ("distill.train", "{w}/recipe.yaml distill.reference={w}/none", "none"),
    ("distill.train", "--resume {w}/empty", "recipe.json"),
    ("distill.train", "--resume {w}/none", "no such folder"),
    ("distill.train", "{w}/recipe.yaml target.model={w}/empty", "no config.json"),
    ("distill.train", "{w}/recipe.yaml traffic.train={w}/none.jsonl", "none.jsonl"),
    ("eval.plan", "none.yaml", "cannot be read"),
    ("eval.plan", "{w}/recipe.yaml --plan {w}/none.json", "none.json"),
    ("eval.plan", "{w}/recipe.yaml --plan {w}/list.json", "no plan"),
    ("eval.plan", "{w}/recipe.yaml --plan {w}/deep.json", "not JSON"),
    ("eval.plan", "{w}/recipe.yaml --what-if draft=", "it must be a number"),
    ("eval.plan", "{w}/recipe.yaml --what-if nothing=1", "is unknown"),
    ("eval.plan", "{w}/recipe.yaml target.model={w}/empty", "no config.json"),
    ("eval.plan", "{w}/recipe.yaml --gpu h100-sxm", "give --device-table"),
    ("eval.plan", "{w}/recipe.yaml --race {w}/list.json", "nothing is overwritten"),
    ("eval.plan", "{w}/recipe.yaml --race {w}/none/race.yaml", "is no folder to write to"),
    ("eval.plan", "{w}/recipe.yaml target.model={w}/empty --race {w}/race.yaml", "no config.json"),
    ("eval.run", "none.yaml", "cannot be read"),
    ("eval.run", "{w}/recipe.yaml", "is no finished draft"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/empty", "is no finished draft"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/draft --draft {w}/draft", "given twice"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/cut --check", "cut/model.safetensors: sha256"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/cut target.model={w}/cut_target --out {w}/out", "cut/model.safetensors"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/negative --check", "num_hidden_layers is -3"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/negative --out {w}/out", "num_hidden_layers is -3"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/draft --against {w}/cut.json", "--against"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/draft --against {w}/deep.json", "--against"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/draft --out {w}/list.json", "list.json"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/draft target.model={w}/empty --out {w}/out", "no config.json"),
    ("eval.run", "{w}/recipe.yaml --draft {w}/draft traffic.heldout={w}/none.jsonl --out {w}/out", "none.jsonl"),
    ("eval.run", "--resume {w}/empty", "no run.json"),
    ("eval.serving", "none.yaml --server " + NOWHERE, "cannot be read"),
    ("eval.serving", "{w}/recipe.yaml --server ftp://a", "ftp://a"),
    ("eval.serving", "{w}/recipe.yaml --server file:///etc/passwd", "file:///etc/passwd"),
    ("eval.serving", "{w}/recipe.yaml --server http://user:pass@a:1", "user"),
    ("eval.serving", "{w}/recipe.yaml --server " + NOWHERE + " --baseline " + NOWHERE, "are both"),
    ("eval.serving", "{w}/recipe.yaml --server " + NOWHERE + " --concurrency 0", "--concurrency"),
    ("eval.serving", "{w}/recipe.yaml --server " + NOWHERE + " --open-rate nan", "--open-rate"),
    ("eval.serving", "{w}/recipe.yaml --server " + NOWHERE + " --timeout -1", "--timeout"),
    ("eval.serving", "{w}/recipe.yaml --server " + NOWHERE + " --report {w}/deep.json", "not JSON"),
    ("eval.serving", "{w}/recipe.yaml --server " + NOWHERE + " --report {w}/list.json", "no report"),
    ("eval.serving", "{w}/recipe.yaml --server " + NOWHERE + " --api-key-env NO_SUCH_NAME", "NO_SUCH_NAME"),
    ("scripts.release", "{w}/none", "no recipe.json"),
    ("scripts.release", "{w}/empty", "no recipe.json"),
    ("scripts.readme_report", "{w}/deep.json", "not JSON"),
    ("scripts.readme_report", "{w}/none.json", "none.json"),
    ("scripts.compare_decoding", "--draft {w}/empty", "no config.json"),
    ("scripts.compare_decoding", "--draft {w}/draft --k 17", "--k 17: allowed are 1 to 16"),
    ("scripts.compare_decoding", "--draft {w}/draft --target {w}/target --self-layers 6", "--self-layers 6"),
    ("scripts.compare_decoding", "--draft {w}/draft --target {w}/target --self-layers 2 --max-prompt 1", "has 1 tok"),
    ("scripts.policy_replay", "--draft {w}/draft --most 0", "--most 0: allowed are 1 to 16"),
    ("scripts.policy_replay", "--draft {w}/draft --plan {w}/cut.json", "not JSON"),
    ("scripts.policy_replay", "--draft {w}/draft --target {w}/target --max-prompt 2", "has 2 tokens or less"),
    ("scripts.policy_replay", "--draft {w}/draft --target {w}/target --prompts {w}/none", "none"),
    ("scripts.window_check", "--draft {w}/draft --recent 0", "--recent 0"),
    ("scripts.window_check", "--draft {w}/draft --contexts 512 64", "a short and a longer one"),
    ("scripts.window_check", "--draft {w}/draft --target {w}/target", "the target has 1024 positions"),
    ("scripts.peer_check", "greedy --draft {w}/empty", "no config.json"),
    ("scripts.peer_check", "greedy", "needs --draft"),
    ("scripts.hardware_check", "--out {w}/empty", "is a folder"),
)  # fmt: skip


@pytest.mark.parametrize("name, words, said", WRONG, ids=lambda value: value[:60])
def test_wrong_words_are_one_message(
    world: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, words: str, said: str
) -> None:
    """T60 to T62 for whole command lines; nothing that looks finished is left."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = {path for path in world.rglob("*") if path.name in ("draft.json", REPORT, RUN, "plan.json")}
    code = run(name, [word.replace("{w}", str(world)) for word in words.split()])
    text = capfd.readouterr().err
    assert code == 2 and said in text and "Traceback" not in text, (code, text)
    assert {path for path in world.rglob("*") if path.name in ("draft.json", REPORT, RUN, "plan.json")} == before
    assert not (world / "out").exists()


@pytest.mark.parametrize("name", [*COMMANDS, *SCRIPTS])
def test_every_command_has_help_and_refuses_unknown_options(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(name, ["--help"]) == 0
    assert "usage:" in capfd.readouterr().out
    assert run(name, ["--no-such-option"]) == 2
    assert "Traceback" not in capfd.readouterr().err


def broken(path: Path, rng: random.Random) -> str:
    """One accident to a JSON file; what it was."""
    if rng.random() < 0.75:
        return f"{path.name}: {edit_json(path, rng)} edited"
    path.write_bytes(damage(path.read_bytes(), rng))
    return f"{path.name} damaged"


def judge(code: int, said: str, allowed: tuple[int, ...] = (0, 1, 2)) -> None:
    """An exit code with its one message; raises ValueError for a refusal, as a tally counts it."""
    assert code in allowed and "Traceback" not in said, (code, said[-500:])
    if code == 2:
        assert "error: " in said or "not released: " in said, said[-500:]
        raise ValueError(said[-3000:])


def test_damaged_plans(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng, tally, path = random.Random(SEED + 6), Tally("plans"), tmp_path / "plan.json"
    kv = {"fit": 0.1, "difference": 0.2, "bandwidth": 0.1}
    costs = [device(c, 1, "recipe").to_json() | {"draft": "recipe", "prefix_kv_ms": kv} for c in (128, 512)]
    shape = {"name": "recipe", "stored_frac": 0.1, "read_frac": 0.1}
    good = {"device": "cpu", "num_threads": 1, "dtype": "bfloat16", "shapes": [shape], "costs": costs}
    path.write_text(json.dumps(good))
    assert run("eval.plan", [str(world / "recipe.yaml"), "--plan", str(path), "--what-if", "draft=0.5"]) == 0
    for _ in times(60):
        path.write_text(json.dumps(good))
        about = broken(path, rng)
        with tally.case(about):
            code = run("eval.plan", [str(world / "recipe.yaml"), "--plan", str(path), "--what-if", "draft=0.5"])
            judge(code, capfd.readouterr().err)
    tally.close()


def test_damaged_reports_at_every_entry(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Reports as --against and --report take them; nothing is measured before they are looked at."""
    rng, tally, path = random.Random(SEED + 7), Tally("reports of other commands"), tmp_path / "report.json"
    good = json.dumps(build_report(make_run(num=5, ks=(2,)), make_plan(), PROVENANCE, settings()))
    recipe, draft = str(world / "recipe.yaml"), str(world / "draft")
    path.write_text(good)
    assert run("eval.run", [recipe, "--draft", draft, "--check", "--against", str(path)]) == 0
    for _ in times(60):
        path.write_text(good)
        about = broken(path, rng)
        with tally.case(about):
            if rng.random() < 0.5:
                code = run("eval.run", [recipe, "--draft", draft, "--check", "--against", str(path)])
            else:
                code = run("eval.serving", [recipe, "--server", NOWHERE, "--report", str(path)])
            judge(code, capfd.readouterr().err)
    tally.close()


def test_damaged_evaluations_on_resume(
    world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T44: an evaluation whose rows are all there makes its report again, or says which file is damaged."""
    monkeypatch.setenv("COLUMNS", "80")
    rng, tally = random.Random(SEED + 8), Tally("evaluations")
    rows = make_run(num=5, ks=(2,))
    about_run: dict[str, Any] = {
        "recipe": {"name": "x", "draft": {"num_layers": 2}}, "settings": settings(bootstrap=50) | {"budget": {}},
        "plan": make_plan(), "provenance": PROVENANCE, "drafts": {"d": str(world / "draft")}, "requests_sha256": "0",
    }  # fmt: skip
    good = tmp_path / "good"
    good.mkdir()
    (good / RUN).write_text(json.dumps(about_run))
    append_rows(good / ROWS, rows)
    Progress(len(rows)).save(good)
    for number in times(25):
        folder = tmp_path / f"eval {number}"
        shutil.copytree(good, folder)
        path, about = folder / rng.choice((RUN, RUN, PROGRESS, ROWS)), "nothing"
        if number and path.name == ROWS:
            path.write_bytes(damage(path.read_bytes(), rng))
            about = "rows damaged"
        elif number:
            about = broken(path, rng)
        with tally.case(about):
            code = run("eval.run", ["--resume", str(folder)])
            said = capfd.readouterr().err
            assert number or (code == 0 and "chosen" in said), said  # the last column, at 80 columns too
            assert (folder / REPORT).exists() == (code == 0), about
            judge(code, said)
        if not number:
            (folder / REPORT).write_text("{")
            assert run("eval.run", ["--resume", str(folder)]) == 2
            assert "report.json: not JSON" in capfd.readouterr().err
        shutil.rmtree(folder)
    tally.close()


def test_damaged_runs_are_not_released(
    made: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """T44, T46: whatever file of a run is damaged, the release is whole or absent."""
    rng, tally = random.Random(SEED + 9), Tally("runs to release")
    for number in times(25):
        run_folder = tmp_path / f"{number}" / made.parent.name / made.name
        shutil.copytree(made, run_folder)
        files = sorted(p for p in run_folder.rglob("*") if p.suffix in (".json", ".jinja", ".safetensors"))
        weights = [4 if p.name in ("report.json", "draft.json", "recipe.json") else 1 for p in files]
        (path,) = rng.choices(files, weights)
        if number == 0:
            about = "nothing"
        elif path.suffix == ".json":
            about = broken(path, rng)
        else:
            path.write_bytes(damage(path.read_bytes(), rng))
            about = f"{path.name} damaged"
        with tally.case(about):
            code = run("scripts.release", [str(run_folder), "--gguf", "none"])
            said = capfd.readouterr().err
            assert number or code == 0, said
            assert (run_folder / "release" / "README.md").exists() == (code == 0), about
            assert [p for p in run_folder.iterdir() if p.name.startswith(".")] == [], about
            judge(code, said)
        shutil.rmtree(tmp_path / f"{number}")
    tally.close()
