"""--check: what lies here is looked at, what does not is named as unknown, and wrong things are one message."""

from __future__ import annotations

import gzip
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from distill.known import bundled_folder
from distill.look import CheckError, look
from distill.recipe import load_recipe
from distill.train import main
from tests.distill.test_train import ROOT, newest, write_world

ONE = "num_layers: 1, size_frac: [0, 1]"
RACE = f"draft={{kind: race, race_steps: 4, candidates: [{{{ONE}}}, {{{ONE}, bridge: true}}]}}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("look"))


def lines(world: Path, *overrides: str) -> str:
    return "\n".join(look(load_recipe(world / "recipe.yaml", overrides), "recipe.yaml"))


def test_sizes_memory_disk_and_minutes_are_told(world: Path) -> None:
    text = lines(world)
    for words in ("M parameters stored", "optimizer", "logits", "of checkpoints", "minutes for 10 steps", "KV cache"):
        assert words in text, words
    assert "at most 24 x 12 tokens, 0.04 MB" in text  # 64 numbers of two bytes each


def test_the_sizes_are_those_that_training_reports(world: Path, tmp_path: Path) -> None:
    assert main([str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", "track.mode=disabled"]) == 0
    size = json.loads((newest(tmp_path) / "draft" / "draft.json").read_text())["size"]
    text = lines(world, f"output_dir={tmp_path}/runs")
    assert f"({size['stored_frac']:.1%} of the target's)" in text
    assert f"drafted token ({size['read_frac']:.1%})" in text
    assert f"measured in {newest(tmp_path)}" in text
    same = f"output_dir={tmp_path}/runs", "distill.lr=1e-5", "distill.max_steps=20"
    assert "measured in" in lines(world, *same)
    for other in ("distill.tokens_per_step=512", "distill.outside_rows=7", "distill.loss={tv: 1.0}"):
        assert "measured in" not in lines(world, f"output_dir={tmp_path}/runs", other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["traffic.train={folder}/none.jsonl"], "traffic.train: {folder}/none.jsonl: no such file"),
        (["traffic.heldout={folder}/broken.jsonl"], "broken.jsonl:2: broken line"),
        (["traffic.train={folder}/other.jsonl"], "neither column 'messages' nor 'prompt'"),
        (["traffic.train={folder}/cut.jsonl.gz"], "damaged gzip"),
        (["traffic.train={folder}"], "is a folder"),
        (["draft.num_layers=null", "draft.layers=[0, 6]"], "draft.layers [0, 6]: the target has layers 0..5"),
        (["draft.num_layers=7"], "draft.num_layers 7: the target has 6"),
        (["draft.num_kv_heads=3"], "draft.num_kv_heads 3: must be in 1..2"),
        (["draft.intermediate_size=200"], "1..128"),
        (["draft.head.size=600"], "the head has 512 rows"),
        (["draft.head={{kind: low_rank, rank: 65}}"], "draft.head.rank = 65: the head is 64 wide"),
        (["draft.size_frac=[0.01, 0.02]"], "draft.size_frac = [0.01, 0.02]"),
        (["traffic.train={folder}/blank.jsonl"], "traffic.train: {folder}/blank.jsonl: no row that can be read"),
        (["target.model={folder}"], "config.json: No such file"),
        (["target.model=/nowhere/at/all"], "/nowhere/at/all: neither a bundled name"),
        (["target.model={folder}/gpt"], "model type 'gpt2' is not supported"),
        (["draft={{kind: pretrained, model: {folder}/gpt}}"], "draft.model {folder}/gpt: model type 'gpt2'"),
        (
            ["target.model={folder}/llama", "draft.hidden_size=35"],
            "needs a multiple of its 4 query heads; try hidden_size 32",
        ),
        (["target.model={folder}/gemma", "draft.hidden_size=32"], "gemma2 norms what its layers write"),
        (["target.model={folder}/moe"], "of type mixtral cannot be pruned"),
        (["target.model={folder}/half"], "num_attention_heads missing"),
        (["distill.reference={folder}"], "distill.reference {folder}: no config.json"),
        (["target.model={folder}/none.gguf"], "none.gguf: no such file"),
        (["target.model={folder}/model.gguf"], "model.gguf: no GGUF file: it begins with b'not '"),
        (["traffic.train={folder}/late.jsonl"], "late.jsonl:3001: broken line"),
        (["eval.domains=[law]"], "Set eval.domains to one of these"),
        (["traffic.train={folder}/same.jsonl"], "Give training prompts that are not held out"),
        (["traffic.train={folder}/plain.jsonl.gz"], "plain.jsonl.gz: no gzip file, though its name ends in .gz"),
        (
            ["distill.teacher=topk", "draft.head={{kind: full}}", "distill.teacher_topk=513"],
            "distill.teacher_topk = 513: target and draft share 512 rows",
        ),
        (["trainer.num_nodes=2", "trainer.strategy=single"], "trainer.strategy = 'single' is one process"),
        (["trainer.strategy=fsdp"], "trainer.strategy = 'fsdp' is for several processes"),
    ],
)
def test_what_would_fail_later_is_one_message_and_exit_2(
    overrides: list[str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (world / "other.jsonl").write_text('{"text": "a"}\n')
    (world / "blank.jsonl").write_text("\n\n")
    (world / "same.jsonl").write_text((world / "heldout.jsonl").read_text())
    (world / "model.gguf").write_text("not a model")
    (world / "plain.jsonl.gz").write_text('{"prompt": "a"}\n')
    (world / "late.jsonl").write_text('{"prompt": "a"}\n' * 3000 + "{\n")
    (world / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 50)[:20])
    whole = json.loads((world / "target" / "config.json").read_text())
    for name, config in (
        ("gpt", {"model_type": "gpt2"}),
        ("llama", whole | {"model_type": "llama"}),
        ("gemma", whole | {"model_type": "gemma2"}),
        ("moe", whole | {"model_type": "mixtral", "num_local_experts": 4}),
        ("half", {key: value for key, value in whole.items() if key != "num_attention_heads"}),
    ):
        (world / name).mkdir(exist_ok=True)
        (world / name / "config.json").write_text(json.dumps(config))
    given = [override.format(folder=world) for override in overrides]
    assert main([str(world / "recipe.yaml"), *given, "--check"]) == 2
    error = capsys.readouterr().err
    assert message.format(folder=world) in error
    assert "Traceback" not in error and error.count("error:") == 1


def test_prompts_are_counted_as_a_run_counts_them(world: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        text = lines(world, "eval.domains=[code, law]", "traffic.num_train=500")
    assert "no held-out prompt of domain law; there are code" in caplog.text
    assert "500 prompts asked for, only 24 there" in caplog.text
    assert "first" not in text


def test_sizes_and_times_are_of_the_prompts_that_are_there(world: Path) -> None:
    assert "at most 24 x 12 tokens" in lines(world, "traffic.num_train=1000000")


def test_of_large_files_the_first_rows_are_read_and_that_is_said(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (world / "late.jsonl").write_text('{"prompt": "a"}\n' * 3000 + "{\n")
    monkeypatch.setattr("distill.look.WHOLE_BYTES", 1000)
    told = lines(world, f"traffic.train={world}/late.jsonl")
    assert "traffic.train: of 0.05 MB the first 1,000 rows of each file were read" in told


def test_a_check_of_a_run_that_is_not_there(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], [str(world / "recipe.yaml")]):
        assert main([*given, "--check", "--resume", str(world / "nothere")]) == 2
        error = capsys.readouterr().err
        assert f"--resume {world}/nothere: no such folder" in error and "mistake" not in error


def test_the_recipe_comes_before_the_estimates(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(world / "recipe.yaml"), "--check"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["name"] == "tiny" and "parameters stored" in said.err
    assert "in all: about 0." in said.err


def test_all_reasons_come_together(world: Path) -> None:
    with pytest.raises(CheckError, match="3 reasons not to start") as caught:
        lines(world, "traffic.train=/none.jsonl", "draft.num_kv_heads=5", "draft.intermediate_size=1000")
    assert len(str(caught.value).splitlines()) == 4


def test_what_is_not_here_is_unknown_not_wrong(world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "a hub id that is not looked up here" in lines(world, "target.model=owner/name")
    assert lines(world, "traffic.train=owner/dataset")
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path))
    assert "not fetched yet" in lines(world, "target.model=smollm2-135m-instruct")
    assert "unknown" in lines(world, "trainer.accelerator=cuda")


def test_skipped_lines_are_no_reason(world: Path) -> None:
    (world / "some.jsonl").write_text('{"prompt": "a"}\nnot json\n{"text": "no prompt"}\n{"prompt": "b"}\n')
    assert lines(world, f"traffic.train={world}/some.jsonl", "traffic.on_bad_line=skip")


def test_every_candidate_of_a_race_is_looked_at(world: Path) -> None:
    race = "draft={{kind: race, race_steps: 4, candidates: [{{layers: [0], size_frac: [0, 1]}}, {second}]}}"
    text = lines(world, race.format(second="{num_layers: 2, size_frac: [0, 1], lora: {rank: 4}}"))
    assert "draft.candidates[1]: " in text and "minutes for 4 steps" in text
    with pytest.raises(CheckError, match=r"draft\.candidates\[1\]\.layers \[0, 9\]"):
        lines(world, race.format(second="{layers: [0, 9]}"))


def test_updates_are_counted_as_peft_makes_them(world: Path) -> None:
    from distill.adapt import add_lora
    from distill.counts import lora_count
    from distill.schema_draft import Lora
    from tests.conftest import make_target

    config = json.loads((world / "target" / "config.json").read_text())
    assert lora_count(config, 4) == add_lora(make_target(), Lora(rank=4))


def test_every_teacher_optimizer_and_process_is_counted(world: Path) -> None:
    plain = lines(world, "draft.head={kind: full}")
    assert "optimizer (adamw)" in plain and "the target's head" in plain and "on each of 1 process:" in plain
    topk = lines(world, "draft.head={kind: full}", "distill.teacher=topk", "distill.teacher_topk=16")
    assert "at most 24 x 12 tokens, 0.04 MB of hidden states on disk and 0.04 MB of the 16 likeliest tokens" in topk
    live = lines(world, "distill.teacher=live")
    assert "(a live teacher does not read them)" in live and "the target " in live
    assert "optimizer (muon)" in lines(world, "distill.optimizer=muon")
    assert "on each of 2 processes (ddp)" in lines(world, "trainer.devices=2")
    assert "reads the whole head" in lines(world) and "reads the whole head" not in plain


def test_a_gpu_of_the_table_is_predicted_for(world: Path) -> None:
    text = lines(world, "trainer.gpu=l4")
    assert "minutes for 10 steps" in text and text.count("predicted for") == 2 and text.count("not measured") == 2
    with pytest.raises(CheckError, match=r"trainer\.gpu = 'l40' is not in the device table.*did you mean l40s"):
        lines(world, "trainer.gpu=l40")
    many = ("distill.tokens_per_step=20000000", "trainer.gpu=l4", "responses.batch_size=2000")
    with pytest.raises(CheckError, match=r"on each device, and l4 has 24\.00 GB"):
        lines(world, *many)


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The sizes of the bundled target, in a cache of their own."""
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path))
    folder = bundled_folder("smollm2-135m-instruct")
    folder.mkdir(parents=True)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3}
    (folder / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "tie_word_embeddings": True}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [("code", 12, 20), ("math", 12, 20), ("qa", 12, 20), ("tiny", 0, 3), ("long", 110, 190)],
)
def test_the_bundled_recipes_pass_and_take_about_what_they_say(
    name: str, lowest: float, highest: float, bundled: Path
) -> None:
    low = ("target.dtype=bfloat16", "trainer.precision=bf16-mixed")  # what the recipes are sized for
    text = "\n".join(look(load_recipe(ROOT / "recipes" / f"{name}.yaml", [f"output_dir={bundled}", *low]), name))
    *parts, whole = (float(found) for found in re.findall(r"about ([\d.]+) minutes", text))
    assert len(parts) == 2 and lowest <= whole <= highest, text  # training and, at most, the answers
    assert whole == pytest.approx(sum(parts), abs=0.6)


def readme_examples(heading: str) -> list[list[str]]:
    """The overrides of each line of a section's block, without what stands behind them."""
    block = (ROOT / "README.md").read_text().split(f"\n### {heading}\n", 1)[1].split("```")[1]
    found = [re.split(r"\s+#", text)[0] for text in block.strip().splitlines()]
    return [re.split(r"\s+(?=[a-z_]+(?:\.[a-z_]+)*=)", text) for text in found if re.match(r"[a-z_.]+=", text)]


def test_what_readme_shows_of_a_draft_passes_with_the_recipe_beside_it(bundled: Path) -> None:
    draft = bundled / "draft"
    draft.mkdir()
    sizes = json.loads((bundled_folder("smollm2-135m-instruct") / "config.json").read_text())
    small = sizes | {"num_hidden_layers": 3, "intermediate_size": 1024}
    (draft / "config.json").write_text(json.dumps(small))
    examples = readme_examples("The draft")
    assert len(examples) > 12
    for one in examples:
        words = [word.replace("DIR", str(draft)) for word in one]
        assert look(load_recipe(ROOT / "recipes" / "code.yaml", [f"output_dir={bundled}", *words]), "code"), one
    chosen = readme_examples("Choosing")
    assert len(chosen) > 10
    for one in chosen:
        assert load_recipe(ROOT / "recipes" / "code.yaml", one), one


def test_the_race_recipe_has_a_control(bundled: Path) -> None:
    text = "\n".join(look(load_recipe(ROOT / "recipes" / "race.yaml", [f"output_dir={bundled}"]), "race"))
    assert re.search(r"candidates\[6\]: .* read per drafted token \(1\.9%\)", text)
    *raced, answers = (float(found) for found in re.findall(r"about ([\d.]+) minutes", text))
    found = re.search(r"in all: about ([\d.]+) to ([\d.]+) minutes", text)
    assert found is not None and len(raced) == 7
    rest = 1520 / 380 - 1  # of the one that goes on
    for told, one in zip(found.groups(), (min(raced), max(raced))):
        assert float(told) == pytest.approx(sum(raced) + answers + rest * one, abs=0.6)


def test_minutes_count_the_teacher_that_runs_and_what_is_trained(bundled: Path) -> None:
    def minutes(*overrides: str) -> float:
        given = load_recipe(ROOT / "recipes" / "code.yaml", [f"output_dir={bundled}", *overrides])
        found = re.search(r"about ([\d.]+) minutes for", "\n".join(look(given, "code")))
        assert found is not None
        return float(found[1])

    # By products: twice the target's 106 M a token beside six times the draft's 8 M and the heads' 64 M: 2.9 times.
    usual = minutes()
    assert 2.8 * usual < minutes("distill.teacher=live") < 3 * usual
    assert minutes("draft.head={kind: full}", "draft.size_frac=[0, 1]", "distill.teacher=topk") < minutes(
        "draft.head={kind: full}", "draft.size_frac=[0, 1]"
    )


def test_prompts_that_leave_no_room_for_an_answer_are_told(world: Path) -> None:
    text = lines(world, "traffic.max_prompt_tok=1000", "distill.max_length=64")
    assert "prompts of more than 63 tokens are left out of training (distill.max_length = 64" in text
    with pytest.raises(CheckError, match=r"responses\.max_new_tok = 4096: the target has \d+ positions"):
        lines(world, "responses.max_new_tok=4096")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["distill.objective=sampling@0.7"], "trains for temperature 0.7, but eval.temperature = 0 chooses"),
        (["distill.objective=greedy", "eval.temperature=1.0"], "trains for temperature 0, but eval.temperature = 1"),
        (["eval.temperature=1.0", "responses.temperatures=[0.0, 0.7]"], "eval.temperature = 1, of which no answer"),
        (["distill.outside_rows=0"], "distill.outside_rows = 0 trains the shortlist's rows alone"),
    ],
)
def test_what_is_seldom_meant_is_told(overrides: list[str], words: str, world: Path) -> None:
    assert words in lines(world, *overrides)
    assert words not in lines(world)


def test_minutes_are_added_up_where_all_are_known(world: Path) -> None:
    for known in ("seed=0", "distill.replay={frac: 0.3}", RACE):
        assert "in all: about" in lines(world, known)
    for unknown in ("trainer.accelerator=cuda", "responses.server=[http://127.0.0.1:9]"):
        assert "in all" not in lines(world, unknown)


def test_it_takes_no_torch_and_no_two_seconds(world: Path) -> None:
    code = (
        "import sys\nfrom distill.train import main\n"
        f"assert main(['{world}/recipe.yaml', '--check']) == 0\n"
        "assert not {'torch', 'transformers', 'lightning', 'pyarrow'} & set(sys.modules)"
    )
    started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - started < 2
