"""A race of drafts: validated first, ranked by predicted speedup, resumable, and the winner's run is its own run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from distill.checkpoint import read_draft
from distill.fit import checkpoint_step
from distill.race import level
from distill.recipe import RecipeError, load_recipe
from distill.runs import Stop
from distill.train import main
from engine.costs import Costs, predicted_speedup
from tests.conftest import make_noisy, make_target, make_tokenizer
from tests.distill.test_track import folded, of, records
from tests.distill.test_train import newest, train_rows, write_world

HEAD = "head: {kind: shortlist, size: 256}, size_frac: [0, 1], dtype: float32"
CANDIDATES = (
    f"{{layers: [0, 5], intermediate_size: 96, {HEAD}}}",
    f"{{num_layers: 2, choose: influence, bridge: true, {HEAD}}}",
    f"{{layers: [0], hidden_size: 32, intermediate_size: 32, num_kv_heads: 1, {HEAD}}}",
)
RACE = f"draft={{kind: race, race_steps: 4, candidates: [{', '.join(CANDIDATES)}]}}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("race"))


@pytest.fixture(scope="module")
def run(world: Path) -> Path:
    assert main([str(world / "recipe.yaml"), RACE]) == 0
    return newest(world)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return list(json.loads((run / "race.json").read_text()))


def test_every_candidate_is_in_the_table_and_the_fastest_goes_on(run: Path) -> None:
    rows = rows_of(run)
    assert [row["candidate"] for row in rows] == [0, 1, 2]
    best = max(rows, key=lambda row: (row["speedup"], -row["candidate"]))
    meta = read_draft(run / "draft").meta
    assert [row["speedup"] for row in meta["race"]] == sorted((row["speedup"] for row in rows), reverse=True)
    assert meta["race"][0] == best
    assert meta["size"]["stored_frac"] == best["stored_frac"]
    assert meta["steps"] == 10
    text = (run / "train.log").read_text()
    assert all(row["draft"] in text for row in rows)
    assert {"stored_frac", "read_frac", "t_ms", "alpha", "tau", "loss", "k", "speedup"} <= rows[0].keys()
    depth, width = {0: (2, 64), 1: (2, 64), 2: (1, 32)}[best["candidate"]]
    config = AutoModelForCausalLM.from_pretrained(run / "draft").config
    assert (config.num_hidden_layers, config.hidden_size) == (depth, width)
    tables = [folded(record.item) for record in of("history", records(run))]
    assert any("race/_type" in values for values in tables)


def test_each_candidate_is_judged_answer_by_answer_and_a_race_without_a_control_says_so(run: Path) -> None:
    for row in rows_of(run):
        judged = json.loads((run / "race" / str(row["candidate"]) / "cycles.json").read_text())
        assert judged["k"] == row["k"] and list(judged["domains"]) == ["code"]
        num, *reached = (sum(column) for column in zip(*judged["domains"]["code"]))
        assert (1 + sum(reached) / num if num else None) == row["tau"]
        assert row["control"] is False and row["winner_over"] is None
    assert "race: no control: the smallest candidate has" in (run / "train.log").read_text()


def test_a_control_in_the_race_is_set_beside_the_winner(world: Path, tmp_path: Path) -> None:
    control = (
        "{layers: [0], hidden_size: 16, intermediate_size: 16, num_kv_heads: 1, size_count: read, dtype: float32, "
        "head: {kind: shortlist, size: 128}, size_frac: [0.01, 0.02]}"
    )
    race = f"draft={{kind: race, race_steps: 4, candidates: [{CANDIDATES[0]}, {control}]}}"
    arguments = [str(world / "recipe.yaml"), race, f"output_dir={tmp_path}/runs", "track.mode=disabled"]
    assert main([*arguments, "distill.max_steps=5"]) == 0
    folder = newest(tmp_path)
    assert [row["control"] for row in rows_of(folder)] == [False, True]
    text = (folder / "train.log").read_text()
    assert "no control" not in text
    # Three held-out answers are too few for an interval.
    assert "is not known" in text or "the control won" in text
    assert [row["control"] for row in read_draft(folder / "draft").meta["race"]].count(True) == 1


def test_the_prediction_is_the_cost_models_at_the_candidates_own_draft_time(run: Path) -> None:
    plans = [json.loads((run / "race" / str(n) / "plan.json").read_text()) for n in range(3)]
    costs = [Costs.from_json(plan["costs"][0]) for plan in plans]
    assert len({one.T_ms for one in costs}) == len({one.V_ms[3] for one in costs}) == 1
    for row, one, plan in zip(rows_of(run), costs, plans):
        assert row["t_ms"] == one.t_ms
        best = [r for r in train_rows(run / "race" / str(row["candidate"])) if "val/speedup" in r][-1]
        assert best["val/code/alpha"] == row["alpha"]
        prefill = plan["prefill_ms"], plan["draft_prefill_ms"]
        wanted = (
            predicted_speedup(one, row["k"], 0.0, *prefill, 16),
            predicted_speedup(one, row["k"], 1.0, *prefill, 16),
        )
        assert wanted[0] <= row["speedup"] <= wanted[1]


def test_the_winners_run_is_the_one_it_would_have_had_alone(run: Path, world: Path, tmp_path: Path) -> None:
    winner = read_draft(run / "draft").meta["race"][0]["candidate"]
    assert [row["step"] for row in train_rows(run) if "loss" in row] == list(range(1, 11))
    alone = [str(world / "recipe.yaml"), f"output_dir={tmp_path}/runs", f"draft={CANDIDATES[winner]}"]
    assert main([*alone, "track.mode=disabled"]) == 0
    saved = [torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (run, newest(tmp_path))]
    for name, value in saved[1]["state_dict"].items():
        assert torch.equal(saved[0]["state_dict"][name], value), name


def test_a_race_that_was_interrupted_goes_on_with_what_is_finished(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    """A signal in step 3 of the second candidate: its checkpoint is kept, the first one is not trained again."""
    arguments = [str(world / "recipe.yaml"), RACE, f"output_dir={tmp_path}/runs", "track.mode=disabled"]
    checks, raised = [0], Stop.check

    def check(self: Stop, found: int | None = None) -> None:
        checks[0] += 1
        # Four steps and the end of the first candidate, then two steps of the second.
        raised(self, 15 if checks[0] == 8 else found)

    monkeypatch.setattr(Stop, "check", check)
    assert main(arguments) == 143
    monkeypatch.undo()
    folder = newest(tmp_path)
    assert [row["candidate"] for row in rows_of(folder)] == [0]
    assert len([row for row in train_rows(folder / "race" / "1") if "loss" in row]) == 3
    first = (folder / "race.json").read_text()
    assert main(["--resume", str(folder)]) == 0
    assert json.loads(first)[0].items() <= rows_of(folder)[0].items()
    for number in (0, 1, 2):
        losses = [[r["loss"] for r in train_rows(f / "race" / str(number)) if "loss" in r] for f in (folder, run)]
        if number == 1:  # steps after the last checkpoint were taken again
            losses = [rows[-2:] for rows in losses]
        assert losses[0] == losses[1]
    assert checkpoint_step(folder / "checkpoints" / "last.ckpt") == 10
    assert not list(folder.glob("race/*/checkpoints"))
    assert main(["--resume", str(folder)]) == 0  # nothing to do


def test_a_candidate_that_diverges_is_out_and_the_race_goes_on(run: Path, world: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run / "draft", broken)
    (broken / "draft.json").unlink()
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] *= float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    bad = f"{{kind: pretrained, model: {broken}, {HEAD}}}"
    race = f"draft={{kind: race, race_steps: 4, candidates: [{bad}, {CANDIDATES[0]}]}}"
    command = [str(world / "recipe.yaml"), "track.mode=disabled"]
    assert main([*command, f"output_dir={tmp_path}/runs", race]) == 0
    first, second = rows_of(newest(tmp_path))
    assert "gradient norm nan" in first["diverged"] and "speedup" not in first
    assert [row["candidate"] for row in read_draft(newest(tmp_path) / "draft").meta["race"]] == [1]
    assert second["step"] > 0
    assert "candidate 1 is out" in (newest(tmp_path) / "train.log").read_text()
    none = f"draft={{kind: race, race_steps: 4, candidates: [{bad}, {bad}]}}"
    assert main([*command, f"output_dir={tmp_path}/none", none]) == 2


def test_a_small_sibling_races_with_what_is_cut(world: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    make_noisy(make_target(), 0.05).save_pretrained(near)
    make_tokenizer().save_pretrained(near)
    sibling_of = f"{{kind: pretrained, model: {near}, {HEAD}}}"
    race = f"draft={{kind: race, race_steps: 4, candidates: [{sibling_of}, {CANDIDATES[0]}]}}"
    assert main([str(world / "recipe.yaml"), "track.mode=disabled", f"output_dir={tmp_path}/runs", race]) == 0
    sibling, cut = rows_of(newest(tmp_path))
    assert sibling["draft"].startswith(str(near)) and sibling["alpha"] > cut["alpha"] and sibling["t_ms"] > cut["t_ms"]
    meta = read_draft(newest(tmp_path) / "draft").meta
    first = max((sibling, cut), key=lambda row: row["speedup"])
    assert meta["race"][0]["candidate"] == first["candidate"]
    # A sibling that goes on is set beside what it was.
    assert ("tuned/code/from" in meta["metrics"]) is (meta["kind"] == "pretrained") is (first is sibling)


def test_levelled_costs_share_the_targets_and_keep_each_ratio() -> None:
    slow = Costs(T_ms=20.0, V_ms={1: 22.0}, t_ms=2.0, d0_ms=0.2, S_ms=0.4, H_ms=0.2)
    fast = Costs(T_ms=10.0, V_ms={1: 11.4}, t_ms=1.1, d0_ms=0.1, S_ms=0.2, H_ms=0.1)
    first, second = level([slow, fast])
    assert first.T_ms == second.T_ms == 15.0
    assert first.V_ms == second.V_ms == {1: pytest.approx(15 * (1.1 + 1.14) / 2)}
    assert (first.t_ms / first.T_ms, second.t_ms / second.T_ms) == pytest.approx((0.1, 0.11))
    assert level([slow]) == [slow]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("{kind: race, race_steps: 4}", "candidates"),
        (f"{{kind: race, candidates: [{CANDIDATES[0]}, {CANDIDATES[1]}]}}", "race_steps"),
        (f"{{kind: race, race_steps: 4, candidates: [{CANDIDATES[0]}]}}", "candidates"),
        (f"{{kind: race, race_steps: 10, candidates: [{', '.join(CANDIDATES)}]}}", "below distill.max_steps"),
        (f"{{kind: race, race_steps: 2, candidates: [{', '.join(CANDIDATES)}]}}", "above distill.warmup_steps"),
        (f"{{kind: race, race_steps: 4, num_layers: 2, candidates: [{', '.join(CANDIDATES)}]}}", "num_layers belongs"),
        (f"{{kind: race, race_steps: 4, candidates: [{RACE[6:]}, {CANDIDATES[0]}]}}", "a race of its own"),
        (
            f"{{kind: race, race_steps: 4, candidates: [{{num_layers: 0}}, {CANDIDATES[0]}]}}",
            "candidates[0].num_layers",
        ),
        (f"{{kind: race, race_steps: 4, candidates: [{{layers: [0], chose: ends}}, {CANDIDATES[0]}]}}", "choose"),
        ("{num_layers: 2, race_steps: 4}", "belongs to kind: race"),
        ("{layers: [0, 1], choose: ends}", "layers names them"),
        ("{kind: pretrained, model: a/b, bridge: true}", "bridge belongs to kind: prune"),
        ("{num_layers: 2, revision: main}", "revision belongs to kind: pretrained"),
        ("{num_layers: 2, untie_head: true, head: {kind: low_rank, rank: 4}}", "one of its own already"),
        ("{num_layers: 2, lora: {}, head: {kind: low_rank, rank: 4}}", "trained whole"),
    ],
)
def test_a_wrong_race_is_refused_before_anything_loads(draft: str, message: str, world: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(world / "recipe.yaml", [f"draft={draft}"])
    assert message in str(caught.value)


def test_a_candidate_out_of_bounds_is_named_before_answers_are_written(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = CANDIDATES[0].replace("layers: [0, 5]", "layers: [0, 9]")
    race = f"draft={{kind: race, race_steps: 4, candidates: [{CANDIDATES[1]}, {wrong}]}}"
    arguments = [str(world / "recipe.yaml"), race, f"output_dir={tmp_path}/runs", "track.mode=disabled"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "draft.candidates[1]" in error and "[0, 9]" in error
    assert not list(tmp_path.rglob("responses"))


def test_a_resolved_race_is_read_back(world: Path, run: Path) -> None:
    again = load_recipe(run / "recipe.json")
    assert again == load_recipe(world / "recipe.yaml", [RACE])
    assert again.draft.candidates is not None and again.draft.candidates[1].bridge
