"""Prune, distil, prune again: each round is cut from the one before, resumes, and leaves the config's details alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config

from distill.checkpoint import read_draft
from distill.look import CheckError, look
from distill.models import load_model
from distill.prune import prune
from distill.recipe import RecipeError, load_recipe, rounds_of
from distill.runs import Stop
from distill.schema_rounds import Round, round_steps
from distill.train import main
from tests.conftest import make_config, make_target
from tests.distill.test_train import newest, train_rows, write_world

ROUNDS = "draft.rounds=[{frac: 0.3, layers: [0, 2, 3, 5]}, {frac: 0.3, layers: [0, 3, 5], intermediate_size: 112}]"
SHAPE = ["draft.num_layers=null", "draft.layers=[0, 5]", "draft.intermediate_size=96", ROUNDS]
SOME = [*SHAPE, "distill.max_steps=14", "distill.warmup_steps=2", "distill.validate_every=7", "track.mode=disabled"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("rounds"))


@pytest.fixture(scope="module")
def done(world: Path) -> Path:
    assert main([str(world / "recipe.yaml"), *SOME]) == 0
    return newest(world)


def test_steps_are_shared_out() -> None:
    assert round_steps([Round(frac=0.3), Round(frac=0.25)], 100) == [30, 25, 45]
    assert round_steps([], 100) == [100]


def test_each_round_is_cut_from_the_one_before_and_named_by_the_targets_layers(done: Path) -> None:
    meta = read_draft(done / "draft").meta
    assert [one["layers"] for one in meta["rounds"]] == [[0, 2, 3, 5], [0, 3, 5]]
    assert [one["steps"] for one in meta["rounds"]] == [4, 4]
    assert (meta["layers"], meta["steps"]) == ([0, 5], 6)
    folders = [done / "rounds" / "0" / "draft", done / "rounds" / "1" / "draft", done / "draft"]
    configs = [AutoModelForCausalLM.from_pretrained(folder).config for folder in folders]
    assert [(c.num_hidden_layers, c.intermediate_size) for c in configs] == [(4, 128), (3, 112), (2, 96)]
    for number, steps in ((0, 4), (1, 4)):
        rows = [row["step"] for row in train_rows(done / "rounds" / str(number)) if "loss" in row]
        assert rows == list(range(1, steps + 1))
        assert not (done / "rounds" / str(number) / "checkpoints").exists()
    assert [row["step"] for row in train_rows(done) if "loss" in row] == list(range(1, 7))


def test_the_first_step_of_a_round_is_taken_by_what_the_round_before_left(done: Path, world: Path) -> None:
    """Layers alone, so the cut is exact: the loss of a round's first step is that of the cut model on the same rows."""
    from distill.batches import BatchPlan, Windows
    from distill.module import DraftModule
    from distill.shape import find_target
    from distill.shortlist import shortlist_of
    from distill.step_loss import step_loss
    from distill.teacher import ResponseDataset

    recipe = load_recipe(done / "recipe.json")
    one = rounds_of(recipe)[0]
    target, model = find_target(recipe), make_target()
    dataset = ResponseDataset(done / "responses", one.distill.max_length)
    config, state = prune(model.config, model.state_dict(), [0, 2, 3, 5])
    draft = AutoModelForCausalLM.from_config(config)
    draft.load_state_dict(state)
    shortlist = shortlist_of(recipe, target.config, dataset.rows, (1, 4))
    module = DraftModule(draft, model.lm_head.weight, one.distill, recipe.seed, shortlist)
    window = next(iter(Windows(dataset, BatchPlan(dataset.lengths, one.distill.tokens_per_step, recipe.seed))))
    import lightning.pytorch as pl

    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    rows = module.rows(window)
    weight, teacher = module._head(rows)
    states, hidden = module.hidden(window[0]), module.target(window[0])
    stage, num = one.distill, len(window[0].labels)
    loss, _ = step_loss(stage, module.softcaps, rows.shift, states, weight, hidden, teacher, rows.labels, num)
    first = next(row["loss"] for row in train_rows(done / "rounds" / "0") if "loss" in row)
    assert first == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("after", [2, 7, 12])
def test_a_resumed_run_is_the_same_run(
    after: int, done: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the first round, in the second, and in the draft's own steps."""
    checks, raised = [0], Stop.check

    def check(self: Stop, found: int | None = None) -> None:
        raised(self, found)
        checks[0] += 1
        if checks[0] == after:
            self.signum = 15

    monkeypatch.setattr(Stop, "check", check)
    assert main([str(world / "recipe.yaml"), *SOME, f"output_dir={tmp_path}/runs"]) == 143
    monkeypatch.undo()
    folder = newest(tmp_path)
    whole = [(folder / "rounds" / n / "draft" / "draft.json").exists() for n in ("0", "1")]
    assert whole == {2: [False, False], 7: [True, False], 12: [True, True]}[after]
    torch.rand(7)
    assert main(["--resume", str(folder)]) == 0
    for part in ("rounds/0/draft", "rounds/1/draft", "draft"):
        mine, theirs = (load_model(str(f / part), "float32").state_dict() for f in (folder, done))
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), (part, name)


def scaled_llama() -> PreTrainedModel:
    """An untied llama with grouped keys, scaled rope, biases, a head size of its own and two ends of text."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        attention_bias=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=[1, 4],
        pad_token_id=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [1, 4]
    return model


def windowed_qwen() -> PreTrainedModel:
    """A tied qwen2 with grouped keys, whose layers are of two kinds."""
    config = make_config().to_dict() | {
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "eos_token_id": [1, 4],
    }
    return make_target(Qwen2Config(**config))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_details_of_the_config_survive_every_round(kind: str, tmp_path: Path) -> None:
    world = write_world(tmp_path)
    target = scaled_llama() if kind == "llama" else windowed_qwen()
    target.save_pretrained(world / "target")
    shape = [
        "draft.rounds=[{frac: 0.3, num_layers: 5, choose: influence}, {frac: 0.3, num_kv_heads: 1}]",
        "draft.num_layers=2",
        "draft.choose=ends",
        "draft.head={kind: full}",
    ]
    assert main([str(world / "recipe.yaml"), *SOME[4:], *shape]) == 0
    run = newest(world)
    meta = read_draft(run / "draft").meta
    held = [*meta["rounds"][0]["layers"]]
    assert len(held) == 5
    assert meta["rounds"][1]["layers"] == held
    assert meta["layers"] == [held[0], held[-1]]
    group = target.config.num_attention_heads // target.config.num_key_value_heads
    for part in ("rounds/0/draft", "rounds/1/draft", "draft"):
        model = AutoModelForCausalLM.from_pretrained(run / part)
        config = model.config
        assert config.rope_parameters == target.config.rope_parameters
        assert config.tie_word_embeddings == target.config.tie_word_embeddings
        assert (config.eos_token_id, model.generation_config.eos_token_id) == ([1, 4], [1, 4])
        assert config.head_dim == (24 if kind == "llama" else 16)
        assert config.vocab_size == 512
        assert config.num_attention_heads == group * config.num_key_value_heads
        tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
        assert tied == (kind == "qwen2")
        if kind == "qwen2":
            kept = {"rounds/0/draft": held, "rounds/1/draft": held, "draft": meta["layers"]}[part]
            assert config.layer_types == [target.config.layer_types[at] for at in kept]
            assert config.sliding_window == 16
        else:
            assert config.attention_bias
        assert model(torch.arange(40)[None]).logits.isfinite().all()
    assert AutoModelForCausalLM.from_pretrained(run / "draft").config.num_key_value_heads == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft.rounds=[{frac: 0.6, num_layers: 4}, {frac: 0.5, num_layers: 3}]"], "draft.rounds take all steps"),
        (["draft.rounds=[{frac: 0.05, num_layers: 4}]"], "draft.rounds take 1 of distill.max_steps = 10 and leave 9"),
        (
            ["draft.rounds=[{frac: 0.3, layers: [0, 1]}]", "draft.layers=[0, 5]", "draft.num_layers=null"],
            "[5] are gone",
        ),
        (["draft.rounds=[{frac: 0.3, layers: [0, 1], num_layers: 2}]"], "num_layers = 2 is given beside layers"),
        (["draft.rounds=[{frac: 0.3, choose: ends}]"], "choose = ends chooses num_layers layers"),
        (
            ["draft.rounds=[{frac: 0.3, num_layers: 4}]", "draft.layers=[0, 5]", "draft.num_layers=null"],
            "rounds[0].num_layers leaves the choice open",
        ),
        (["draft.rounds=[{num_layers: 4}]"], "frac"),
        (["draft.rounds=[{frac: 0.3, num_layers: 4}]", "trainer.devices=2"], "draft.rounds run in one process"),
        (["draft={kind: pretrained, model: x, rounds: [{frac: 0.3, num_layers: 4}]}"], "belongs to kind: prune"),
        (
            [
                "draft={kind: race, race_steps: 4, candidates: [{num_layers: 2, rounds: [{frac: 0.3}]}, "
                "{num_layers: 3}]}"
            ],
            "[0] has rounds",
        ),
    ],
)
def test_rounds_that_do_not_go_together_are_refused(world: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(world / "recipe.yaml", overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ("[{frac: 0.3, num_layers: 7}]", "draft.rounds[0].num_layers 7: the target has 6"),
        ("[{frac: 0.3, num_layers: 4}, {frac: 0.3, num_layers: 5}]", "draft.rounds[1].num_layers 5: the round before"),
        ("[{frac: 0.3, intermediate_size: 90}]", "draft.intermediate_size 96: must be in 1..90, the round before's"),
        ("[{frac: 0.3, num_layers: 1}]", "draft.num_layers 2: the round before has 1"),
    ],
)
def test_a_round_that_grows_is_refused_before_a_model_is_loaded(
    rounds: str, message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(world / "recipe.yaml", [f"draft.rounds={rounds}"])
    with pytest.raises(CheckError) as caught:
        look(recipe, "recipe.yaml")
    assert message in str(caught.value)
    assert main([str(world / "recipe.yaml"), f"draft.rounds={rounds}", "track.mode=disabled"]) == 2
    assert "answers:" not in capsys.readouterr().err


def test_check_tells_what_each_round_takes(world: Path) -> None:
    text = "\n".join(look(load_recipe(world / "recipe.yaml", SOME), "recipe.yaml"))
    for key, steps in (("draft.rounds[0]", 4), ("draft.rounds[1]", 4), ("draft", 6)):
        assert any(line.startswith(f"{key}: about") and f"for {steps} steps" in line for line in text.splitlines()), key


def test_rounds_survive_the_recipe_that_a_run_keeps(done: Path) -> None:
    recipe = load_recipe(done / "recipe.json")
    assert [one.frac for one in recipe.draft.rounds] == [0.3, 0.3]
    assert json.loads((done / "recipe.json").read_text())["draft"]["rounds"][1]["intermediate_size"] == 112
