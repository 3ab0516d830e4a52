"""The entry, end to end on a tiny target: recipe -> answers -> draft folder; refusals, signals, resumption."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distill.checkpoint import read_draft, verify_draft
from distill.fit import checkpoint_step
from distill.look import look
from distill.models import load_tokenizer
from distill.recipe import RecipeError, load_recipe
from distill.runs import Run
from distill.shape import find_target
from distill.stages import held_out
from distill.traffic import load_prompts
from distill.train import main
from eval.prompts import choose_prompts
from tests.conftest import make_config, make_target, make_tokenizer
from tests.distill.test_track import folded, of, records

ROOT = Path(__file__).parents[2]
RECIPE = """
name: tiny
output_dir: {folder}/runs
target: {{model: {folder}/target, dtype: float32}}
draft:
  num_layers: 2
  intermediate_size: 96
  head: {{kind: shortlist, size: 256}}
  size_frac: [0.1, 0.9]
  dtype: float32
traffic: {{train: {folder}/train.jsonl, heldout: {folder}/heldout.jsonl, domain: code, max_prompt_tok: 64}}
responses: {{max_new_tok: 12, batch_size: 8, shard_rows: 16}}
distill:
  max_steps: 10
  warmup_steps: 2
  tokens_per_step: 256
  max_length: 80
  validate_every: 5
  checkpoint_every: 5
  num_validation: 3
  outside_rows: 64
eval: {{k: [1, 3], num_requests: 2, min_requests: 2, max_new_tok: 16, domains: [code, math]}}
trainer: {{accelerator: cpu, precision: 32-true, num_threads: 1}}
"""


def write_world(folder: Path) -> Path:
    """A target, prompts of two domains, and the recipe."""
    make_target().save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    words = ("fox", "dog", "train", "city", "river", "apple", "word", "line", "file", "speed", "page", "lamp")
    for name, count, first in (("train", 24, 0), ("heldout", 6, 100)):
        rows = [
            {
                "domain": domain,
                "prompt": f"Say {words[n % 12]} {n + first} times for {words[(5 * n + 1) % 12]} ({domain}).",
            }
            for domain in ("code", "math")
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder


def newest(folder: Path) -> Path:
    return max(path for path in (folder / "runs" / "tiny").iterdir() if path.name != "latest")


def train_rows(run: Path) -> list[dict[str, Any]]:
    path = run / "train.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def test_a_narrow_draft_of_a_tied_target_may_have_a_head_of_its_own(world: Path, tmp_path: Path) -> None:
    shape = ["draft.hidden_size=32", "draft.untie_head=true"]
    arguments = [str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", "track.mode=disabled", *shape]
    assert main(arguments) == 0
    meta = read_draft(newest(tmp_path) / "draft").meta
    draft = AutoModelForCausalLM.from_pretrained(newest(tmp_path) / "draft")
    head, embedding = draft.lm_head.weight, draft.get_input_embeddings().weight
    assert head.shape == embedding.shape == (512, 32) and not torch.equal(head, embedding)
    assert draft.config.tie_word_embeddings is False
    assert meta["size"]["stored"] == sum(weight.numel() for weight in draft.parameters())
    text = "\n".join(look(load_recipe(world / "recipe.yaml", shape), "recipe"))
    assert f"({meta['size']['stored_frac']:.1%} of the target's)" in text
    with pytest.raises(RecipeError, match="untie_head belongs to kind: prune"):
        load_recipe(world / "recipe.yaml", ["draft={kind: pretrained, model: a/b, untie_head: true}"])


@pytest.fixture(scope="module")
def run(world: Path) -> Path:
    """A finished run."""
    assert main([str(world / "recipe.yaml")]) == 0
    return newest(world)


def test_the_run_folder_is_complete(run: Path) -> None:
    for name in (
        "recipe.json",
        "provenance.json",
        "plan.json",
        "train.jsonl",
        "train.log",
        "curves.svg",
        "draft/draft.json",
    ):
        assert (run / name).is_file(), name
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt", "best.ckpt"}
    assert (run.parent / "latest").resolve() == run.resolve()
    assert [row["step"] for row in train_rows(run) if "loss" in row] == list(range(1, 11))


def test_the_draft_loads_with_stock_classes_and_fits_the_target(run: Path, world: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "draft")
    assert (model.config.num_hidden_layers, model.config.intermediate_size, model.config.vocab_size) == (2, 96, 512)
    assert model(torch.arange(10)[None]).logits.isfinite().all()
    target = load_tokenizer(str(world / "target"))
    draft = verify_draft(run / "draft", load_tokenizer(str(run / "draft")), target, 512)
    assert draft.shortlist is not None
    assert len(draft.shortlist) == 256
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(model.model.norm.weight, best["draft.model.norm.weight"])


def test_t22_the_card_says_what_it_learnt_from(run: Path) -> None:
    meta = read_draft(run / "draft").meta
    assert meta["answers"]["source"] == "target"
    assert meta["answers"]["answered"] == 24
    assert meta["traffic"]["domain"] == "code"
    assert meta["steps"] == 10
    assert meta["metrics"]["step"] in (5, 10)
    assert 0 < meta["size"]["read_frac"] < meta["size"]["stored_frac"] < 1


def test_t07_what_is_trained_on_is_said_before_the_first_step(run: Path) -> None:
    text = (run / "train.log").read_text()
    for words in ("24 answers", "supervised tokens", "parameters stored", "covers held-out answers: code", "epochs"):
        assert words in text, words
    assert text.index("supervised tokens") < text.index("validation at step 5")


def test_t54_the_tracked_run_holds_config_summary_and_draft(run: Path) -> None:
    found = records(run)
    config = folded(of("run", found)[0].config.update)
    assert config["recipe"]["distill"]["max_steps"] == 10
    assert config["target"].endswith("target")
    assert "git" in json.dumps(config["provenance"])
    assert any("curves/_type" in folded(record.item) for record in of("history", found))
    summary: dict[str, Any] = {}
    for record in of("summary", found):
        summary |= folded(record.update)
    assert summary["train/loss"] == pytest.approx(train_rows(run)[-2]["loss"])
    assert "val/speedup" in summary
    assert [artifact.name for artifact in of("artifact", found) if artifact.type == "model"] == ["draft-tiny"]
    assert [record.exit_code for record in of("exit", found)] == [0]


def test_validation_asks_other_prompts_than_the_evaluation(world: Path) -> None:
    recipe = load_recipe(world / "recipe.yaml")
    target = find_target(recipe)
    every = load_prompts(recipe.traffic, "heldout", recipe.seed, recipe.eval.domains)
    chosen = held_out(recipe, target)
    # Short prompts and one number: the last ones but the first of each domain, as ever.
    assert chosen == [p for d in ("code", "math") for p in [p for p in every if p.domain == d][2:][-3:]]
    more = held_out(load_recipe(world / "recipe.yaml", ["distill.num_validation=100"]), target)
    assert len(more) == 8  # 6 of each domain, less the 2 that are evaluated
    by_group = "eval.num_requests={short: 3, long: 2}"
    assert len(held_out(load_recipe(world / "recipe.yaml", ["distill.num_validation=100", by_group]), target)) == 6


@pytest.mark.parametrize("asked", ["2", "{short: 2, medium: 3}"])
@pytest.mark.parametrize("limit", ["3000", "3000 cut", "1500", "1500 cut"])
def test_validation_leaves_out_what_is_evaluated_of_each_context_group(
    world: Path, tmp_path: Path, asked: str, limit: str
) -> None:
    sizes = [5, 5, 5, 5, 5, 1200, 5, 1200, 1200, 5, 1200, 1800, 1800, 5, 1200, 1800]
    lines = [
        {"prompt": " ".join([f"{domain}{i}", *["fox"] * num]), "domain": domain, "id": f"{domain}{i}"}
        for domain in ("code", "math")
        for i, num in enumerate(sizes)
    ]
    (tmp_path / "heldout.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    most, *cut = limit.split()
    changes = [f"traffic.heldout={tmp_path / 'heldout.jsonl'}", f"traffic.max_prompt_tok={most}"]
    changes += [f"eval.num_requests={asked}", f"eval.cut_long={'true' if cut else 'false'}"]
    recipe = load_recipe(world / "recipe.yaml", [*changes, "distill.num_validation=100"])
    target = find_target(recipe)
    config = copy.deepcopy(target.config)
    config.max_position_embeddings = 8192
    for asks in (target, replace(target, config=config)):
        cells = choose_prompts(recipe, asks.tokenizer, asks.config.max_position_embeddings).cells
        evaluated = {taken.prompt.id for cell in cells.values() for taken in cell}
        every = load_prompts(recipe.traffic, "heldout", recipe.seed, recipe.eval.domains)
        assert [p.id for p in held_out(recipe, asks)] == [p.id for p in every if p.id not in evaluated]


def test_t47_a_finished_run_has_nothing_to_do(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix in (".ckpt", ".safetensors")}
    assert main(["--resume", str(run)]) == 0
    assert "nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(run.glob("wandb/offline-run-*"))) == 1


def test_a_resumed_run_keeps_its_settings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--resume", str(run), "distill.lr=0.1"]) == 2
    assert "distill.lr" in capsys.readouterr().err


def start(world: Path, *overrides: str) -> subprocess.Popen[str]:
    """Trains in a process of its own, with more steps than it will get to."""
    command = [sys.executable, "-m", "distill.train", str(world / "recipe.yaml"), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_t46_an_interrupted_run_can_be_resumed_and_does_not_look_finished(
    signum: int, code: int, tmp_path: Path
) -> None:
    world = write_world(tmp_path)
    process = start(world, "distill.max_steps=100000", "distill.checkpoint_every=50000", "distill.validate_every=50000")
    wait_for(lambda: (world / "runs").exists() and len(train_rows(newest(world))) >= 3, process)
    process.send_signal(signum)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == code, error
    assert "--resume" in error
    run = newest(world)
    assert not (run / "draft").exists()
    assert not (run.parent / "latest").exists()
    step = checkpoint_step(Run(run).last)
    assert step == train_rows(run)[-1]["step"]
    assert [record.exit_code for record in of("exit", records(run))] == [code]
    if signum == signal.SIGTERM:
        assert main(["--resume", str(run), f"distill.max_steps={step + 2}"]) == 0
        assert read_draft(run / "draft").meta["steps"] == step + 2
        assert [row["step"] for row in train_rows(run) if row["attempt"] == 1][:2] == [step + 1, step + 2]


def test_t46_a_signal_while_answers_are_written_leaves_no_draft(tmp_path: Path) -> None:
    world = write_world(tmp_path)
    process = start(world, "responses.max_new_tok=64", "responses.batch_size=1", "responses.shard_rows=1")
    shards = "runs/tiny/*/responses/rows-*.jsonl"
    wait_for(lambda: any(world.glob(shards)), process)
    process.terminate()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 143, error
    assert "no checkpoint yet" in error
    assert not (newest(world) / "draft").exists()


def test_check_validates_without_torch() -> None:
    code = (
        "import sys\nfrom distill.train import main\nassert main(['recipes/tiny.yaml', '--check']) == 0\n"
        "assert not {'torch', 'transformers', 'lightning', 'wandb'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["name"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft.size_frac=[0.01, 0.02]"], "draft.size_frac"),
        (["draft.head={kind: shortlist, size: 600}", "draft.size_frac=[0, 1]"], "600"),
        (["draft.layers=[0, 9]", "draft.num_layers=null"], "9"),
        (["trainer.num_nodes=2"], "trainer.num_nodes"),
        (["trainer.devices=2", "trainer.strategy=single"], "trainer.strategy = 'single'"),
        (["trainer.strategy=fsdp"], "trainer.strategy = 'fsdp'"),
        (["trainer.devices=2", "trainer.strategy=fsdp", "distill.optimizer=muon"], "distill.optimizer = 'muon'"),
        (["distill.teacher=topk"], "distill.teacher"),
        (["distill.teacher=topk", "distill.teacher_topk=600", "draft.head={kind: full}"], "distill.teacher_topk = 600"),
        (["distill.reference=/nowhere/at/all"], "/nowhere/at/all: no config.json"),
        (["distill.learing_rate=1.0"], "learing_rate"),
        (["target.model=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(
    overrides: list[str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(world / "recipe.yaml"), f"output_dir={world}/refused", "track.mode=disabled", *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list((world / "refused").rglob("responses"))  # before anything was generated


def test_t03_a_pretrained_draft_with_another_tokenizer_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_target(seed=4).save_pretrained(tmp_path / "other")
    make_tokenizer(480).save_pretrained(tmp_path / "other")
    stage = f"draft={{kind: pretrained, model: {tmp_path}/other, size_frac: [0, 1]}}"
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}", "track.mode=disabled", stage]) == 2
    assert "id " in capsys.readouterr().err


@pytest.mark.parametrize("head", ["{kind: full}", "{kind: low_rank, rank: 16}"])
def test_other_heads_and_a_pretrained_draft(head: str, world: Path, tmp_path: Path) -> None:
    make_target(make_config(layers=2), seed=4).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    stage = f"draft={{kind: pretrained, model: {tmp_path}/other, size_frac: [0, 1], head: {head}, dtype: float32}}"
    extra = ["distill.max_steps=3", "track.mode=disabled", "eval.temperature=0.7"]
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", stage, *extra]) == 0
    draft = read_draft(newest(tmp_path) / "draft")
    assert draft.shortlist is None
    assert (draft.factors is not None) == ("low_rank" in head)
    model = AutoModelForCausalLM.from_pretrained(draft.folder)
    if draft.factors is not None:
        left, right = draft.factors
        torch.testing.assert_close(model.lm_head.weight, left @ right, rtol=1e-4, atol=1e-4)
    assert not list(newest(tmp_path).glob("wandb"))


def test_layers_by_influence_and_a_bridge_start_a_draft(world: Path, tmp_path: Path) -> None:
    extra = ["draft.choose=influence", "draft.bridge=true", "distill.max_steps=3", "track.mode=disabled"]
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", *extra]) == 0
    meta = read_draft(newest(tmp_path) / "draft").meta
    assert len(meta["layers"]) == 2
    assert meta["bridge"]["error_after"] < meta["bridge"]["error_before"]
    assert meta["bridge"]["num_tok"] > 100


def test_the_teachers_give_one_draft(world: Path, tmp_path: Path) -> None:
    """Cached states, the live target and top-k with k = V: the same losses and weights, to the states' bf16."""
    rows = {}
    for teacher in ("hidden", "live", "topk"):
        stage = [f"distill.teacher={teacher}", "distill.teacher_topk=512", "draft.head={kind: full}"]
        extra = ["distill.max_steps=5", "track.mode=disabled", f"output_dir={tmp_path}/{teacher}/runs"]
        assert main([str(world / "recipe.yaml"), *stage, *extra]) == 0
        run = newest(tmp_path / teacher)
        rows[teacher] = [row["loss"] for row in train_rows(run) if "loss" in row]
        assert (run / "responses" / "topk-00000.safetensors").exists() == (teacher == "topk")
    assert rows["topk"] == pytest.approx(rows["hidden"], rel=1e-4)
    assert rows["live"] == pytest.approx(rows["hidden"], rel=5e-3)


def test_a_finished_draft_can_select_the_tokens_of_the_next(run: Path, world: Path, tmp_path: Path) -> None:
    extra = [f"distill.reference={run}/draft", "distill.max_steps=3", "track.mode=disabled"]
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", *extra]) == 0
    for row in (row for row in train_rows(newest(tmp_path)) if "loss" in row):
        assert row["num_trained"] < row["num_tok"]
        assert row["reference_ms"] > 0


def test_t01_the_likeliest_tokens_are_among_the_rows_that_a_smaller_draft_has(world: Path, tmp_path: Path) -> None:
    """Rows are padded to different multiples: 576 in the target, 512 in the draft; and likely here."""
    wide, small = make_target(make_config(rows=576), seed=5), make_target(make_config(layers=2), seed=4)
    with torch.no_grad():
        wide.get_output_embeddings().weight[512:] = 0.9 * wide.get_output_embeddings().weight[:64]
    for name, model in (("wide", wide), ("small", small)):
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    stage = f"draft={{kind: pretrained, model: {tmp_path}/small, size_frac: [0, 1], dtype: float32}}"
    extra = [f"target.model={tmp_path}/wide", "distill.teacher=topk", "distill.teacher_topk=16", "distill.max_steps=3"]
    extra += ["responses.temperatures=[0.0]"]
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", stage, "track.mode=disabled", *extra]) == 0
    ids = load_file(newest(tmp_path) / "responses" / "topk-00000.safetensors")["ids"]
    assert int(ids.max()) < 512
    extra[2] = "distill.teacher_topk=513"
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", stage, "track.mode=disabled", *extra]) == 2


def test_t01_a_draft_with_more_rows_learns_the_shared_ones(world: Path, tmp_path: Path) -> None:
    """Rows are padded to different multiples: 576 in the draft, 512 in the target, one tokenizer."""
    make_target(make_config(layers=2, rows=576), seed=4).save_pretrained(tmp_path / "padded")
    make_tokenizer().save_pretrained(tmp_path / "padded")
    stage = f"draft={{kind: pretrained, model: {tmp_path}/padded, size_frac: [0, 1], dtype: float32}}"
    extra = ["distill.max_steps=3", "track.mode=disabled"]
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", stage, *extra]) == 0
    assert AutoModelForCausalLM.from_pretrained(newest(tmp_path) / "draft").config.vocab_size == 576
    text = (newest(tmp_path) / "train.log").read_text()
    assert "512" in text
    assert "576" in text
