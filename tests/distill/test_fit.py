"""The loop around the module: exact resumption at any step, interrupts, the best checkpoint, honest step counts."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from distill import ranks
from distill.fit import checkpoint_step, fit
from distill.module import DraftModule
from distill.recipe import Recipe
from distill.runs import Interrupted, Run, Stop
from distill.schema import Distill, Draft, Eval, Traffic, TrainerStage
from distill.teacher import ResponseDataset
from distill.track import NullTracker
from distill.validation import Served, Validation
from engine.costs import Costs
from tests.conftest import make_config, make_noisy, make_target
from tests.distill.test_module import write_answers

COSTS = Costs(T_ms=10.0, V_ms={1: 11.0, 2: 12.0, 3: 13.0}, t_ms=1.0)
SIZES = [(5 + 3 * n % 20, 4 + 5 * n % 17) for n in range(24)]
STAGE = Distill(
    max_steps=20,
    warmup_steps=5,
    tokens_per_step=64,
    max_length=40,
    accumulate=2,
    lr=3e-3,
    validate_every=5,
    checkpoint_every=4,
    outside_rows=64,
)


class Lost(Exception):
    """Power, memory, a device."""


class LoseAt(NullTracker):
    """Ends the process's training at some step, with nothing saved since the last checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, step: int, values: Any) -> None:
        if step == self.step and "train/loss" in values:
            raise Lost


class SignalAt(NullTracker):
    """Sends this process a signal when a training row of some step is logged."""

    def __init__(self, step: int, signum: int) -> None:
        self.step, self.signum = step, signum

    def log(self, step: int, values: Any) -> None:
        if step == self.step and "train/loss" in values:
            os.kill(os.getpid(), self.signum)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, t_tied: PreTrainedModel) -> ResponseDataset:
    return ResponseDataset(write_answers(tmp_path_factory.mktemp("answers") / "a", t_tied, SIZES), max_length=40)


def recipe(stage: Distill = STAGE, precision: str = "32-true") -> Recipe:
    return Recipe(
        name="tiny",
        seed=3,
        draft=Draft(num_layers=2),
        traffic=Traffic(domain="code"),
        distill=stage,
        eval=Eval(k=(1, 2, 3)),
        trainer=TrainerStage(accelerator="cpu", precision=precision),  # type: ignore[arg-type]
    )


def train(
    folder: Path,
    target: PreTrainedModel,
    dataset: ResponseDataset,
    recipe: Recipe,
    tracker: NullTracker | None = None,
    attempt: int = 0,
    draft: PreTrainedModel | None = None,
) -> tuple[DraftModule, dict[str, Any]]:
    """Trains a fresh module in `folder`, from its newest whole checkpoint when `attempt` > 0."""
    folder.mkdir(exist_ok=True)
    run = Run(folder, attempt)
    draft = draft or make_target(make_config(layers=2), seed=5)
    head = target.get_output_embeddings().weight
    module = DraftModule(draft, head, recipe.distill, recipe.seed, torch.arange(0, 512, 2))
    validation = Validation(dataset, Served(COSTS, (1, 2, 3)), batch_tok=128, chunk_tok=32)
    resume_from = run.newest_whole() if attempt else None
    with Stop().listening() as stop:
        best = fit(recipe, run, module, dataset, validation, stop, tracker or NullTracker(), resume_from)
    return module, best


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def trail(folder: Path) -> dict[tuple[int, bool], dict[str, Any]]:
    """What was logged, without what depends on the clock: by step and kind."""
    timed = ("attempt", "step_ms", "tok_per_s")
    return {(r["step"], "loss" in r): {k: v for k, v in r.items() if k not in timed} for r in rows(folder)}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, t_tied: PreTrainedModel, dataset: ResponseDataset) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, t_tied, dataset, recipe())
    return folder


def test_a_signal_that_comes_while_the_processes_agree_is_not_lost(
    tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too late for this step, which the others end without knowing of it; the next one stops."""
    calls, agree = [0], ranks.largest

    def signalled(number: int, device: torch.device) -> int:
        found = agree(number, device)
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(ranks, "largest", signalled)
    with pytest.raises(Interrupted):
        train(tmp_path, t_tied, dataset, recipe())
    assert checkpoint_step(tmp_path / "checkpoints" / "last.ckpt") == 4


# Before the first checkpoint, on one, between two, on a validation, on both, one before the last.
@pytest.mark.parametrize("step", [1, 4, 7, 10, 15, 16, 19])
def test_t42_a_resumed_run_is_the_same_run(
    step: int, whole: Path, tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    with pytest.raises(Interrupted) as caught:
        train(tmp_path, t_tied, dataset, recipe(), SignalAt(step, signal.SIGTERM))
    assert caught.value.signum == signal.SIGTERM
    assert checkpoint_step(tmp_path / "checkpoints" / "last.ckpt") == step  # nothing is lost
    torch.rand(10)  # the generators may have moved in the meantime
    train(tmp_path, t_tied, dataset, recipe(), attempt=1)
    assert trail(tmp_path) == trail(whole)
    for name in ("last.ckpt", "best.ckpt"):
        expected, found = (weights(folder / "checkpoints" / name) for folder in (whole, tmp_path))
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    first, second = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (whole, tmp_path))
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        states = [saved["optimizer_states"][0]["state"] for saved in (first, second)]
        assert all(torch.equal(states[1][key][moment], states[0][key][moment]) for key in states[0])


def test_t42_twenty_random_ends_change_nothing(
    tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    """Signals, which save, and faults, which do not: each attempt goes on from its checkpoint, the end is the same."""
    long = recipe(STAGE.model_copy(update={"max_steps": 60, "tokens_per_step": 48, "accumulate": 1}))
    train(tmp_path / "whole", t_tied, dataset, long)
    chance = random.Random(20)
    points = sorted(chance.sample(range(1, 60), 20))
    folder, run, begins = tmp_path / "ended", Run(tmp_path / "ended"), [1]
    for attempt, step in enumerate(points):
        fault = chance.random() < 0.5
        ender = LoseAt(step) if fault else SignalAt(step, chance.choice((signal.SIGTERM, signal.SIGINT)))
        with pytest.raises(Lost if fault else Interrupted):
            train(folder, t_tied, dataset, long, ender, attempt)
        saved = checkpoint_step(run.last) if run.last.exists() else 0
        assert saved == step if not fault else step - STAGE.checkpoint_every <= saved < step
        begins.append(saved + 1)
    train(folder, t_tied, dataset, long, attempt=20)
    taken = [(row["attempt"], row["step"]) for row in rows(folder) if "loss" in row]
    assert len(taken) == len(set(taken))
    assert [next(step for number, step in taken if number == attempt) for attempt in range(21)] == begins
    assert trail(folder) == trail(tmp_path / "whole")
    for name in ("last.ckpt", "best.ckpt"):
        expected, found = (weights(tmp_path / f / "checkpoints" / name) for f in ("whole", "ended"))
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_t42_bf16_and_two_interrupts(tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    mixed = recipe(precision="bf16-mixed")
    train(tmp_path / "a", t_tied, dataset, mixed)
    for attempt, step in enumerate((3, 12)):
        with pytest.raises(Interrupted):
            train(tmp_path / "b", t_tied, dataset, mixed, SignalAt(step, signal.SIGINT), attempt)
    train(tmp_path / "b", t_tied, dataset, mixed, attempt=2)
    assert trail(tmp_path / "a") == trail(tmp_path / "b")


def test_t42_packed_rows_resume_bit_for_bit(tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    packed = recipe(STAGE.model_copy(update={"packing": True}))
    train(tmp_path / "a", t_tied, dataset, packed)
    with pytest.raises(Lost):
        train(tmp_path / "b", t_tied, dataset, packed, LoseAt(7))
    train(tmp_path / "b", t_tied, dataset, packed, attempt=1)
    assert trail(tmp_path / "a") == trail(tmp_path / "b")
    first, second = (weights(tmp_path / folder / "checkpoints" / "last.ckpt") for folder in "ab")
    assert all(torch.equal(first[key], value) for key, value in second.items())
    losses = [row["loss"] for row in rows(tmp_path / "a") if "loss" in row]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_t42_muon_resumes_bit_for_bit(tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    muon = recipe(STAGE.model_copy(update={"optimizer": "muon", "weight_decay": 0.1}))
    train(tmp_path / "a", t_tied, dataset, muon)
    with pytest.raises(Interrupted):
        train(tmp_path / "b", t_tied, dataset, muon, SignalAt(7, signal.SIGTERM))
    train(tmp_path / "b", t_tied, dataset, muon, attempt=1)
    assert trail(tmp_path / "a") == trail(tmp_path / "b")
    assert [row["step"] for row in rows(tmp_path / "a") if "loss" in row] == list(range(1, 21))  # one step each
    first, second = (torch.load(tmp_path / f / "checkpoints" / "last.ckpt", weights_only=True) for f in "ab")
    assert all(torch.equal(first["state_dict"][key], value) for key, value in second["state_dict"].items())
    states = [saved["optimizer_states"][0]["state"] for saved in (first, second)]
    assert {name for state in states[0].values() for name in state} == {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert all(torch.equal(states[0][i][name], states[1][i][name]) for i in states[0] for name in states[0][i])
    losses = [row["loss"] for row in rows(tmp_path / "a") if "loss" in row]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_t44_a_cut_checkpoint_costs_only_its_steps(
    whole: Path, tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path, t_tied, dataset, recipe(), SignalAt(11, signal.SIGTERM))
    last = Run(tmp_path).last
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    train(tmp_path, t_tied, dataset, recipe(), attempt=1)
    assert "falling back" in caplog.text
    assert next(row["step"] for row in rows(tmp_path) if row["attempt"] == 1) == 9
    assert trail(tmp_path) == trail(whole)


def test_t55_every_step_is_logged_once_an_attempt(whole: Path) -> None:
    assert [row["step"] for row in rows(whole) if "loss" in row] == list(range(1, 21))
    validated = [row for row in rows(whole) if "val/speedup" in row]
    assert [row["step"] for row in validated] == [5, 10, 15, 20]
    assert {"val/code/alpha", "val/code/alpha_whole", "val/math/overlap", "val/math/tau_3"} <= validated[0].keys()


def test_time_left_is_estimated(
    tmp_path: Path,
    t_tied: PreTrainedModel,
    dataset: ResponseDataset,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distill.keeper.ESTIMATE_AFTER", 2)
    caplog.set_level("INFO")
    train(tmp_path, t_tied, dataset, recipe(STAGE.model_copy(update={"max_steps": 4, "warmup_steps": 0})))
    assert "minutes of training left" in caplog.text


def test_training_helps(whole: Path) -> None:
    losses = [row["loss"] for row in rows(whole) if "loss" in row]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_t47_more_steps_go_on_from_the_end(
    whole: Path, tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    train(tmp_path, t_tied, dataset, recipe(STAGE.model_copy(update={"max_steps": 10})))
    again = train(tmp_path, t_tied, dataset, recipe(STAGE.model_copy(update={"max_steps": 10})), attempt=1)
    assert [row for row in rows(tmp_path) if row["attempt"] == 1] == []  # nothing was done
    assert again[1]["step"] in (5, 10)
    train(tmp_path, t_tied, dataset, recipe(STAGE.model_copy(update={"max_steps": 15})), attempt=2)
    assert [row["step"] for row in rows(tmp_path) if row["attempt"] == 2 and "loss" in row] == [11, 12, 13, 14, 15]
    assert checkpoint_step(Run(tmp_path).last) == 15


def test_best_checkpoint_is_the_best_validation_not_the_last(
    tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    """A good draft that a far too large rate ruins: the first validation is the best one."""
    ruin = Distill(lr=0.1, max_steps=12, warmup_steps=11, tokens_per_step=64, max_length=40, validate_every=1)
    module, best = train(tmp_path, t_tied, dataset, recipe(ruin), draft=make_noisy(t_tied, 0.02))
    validated = {row["step"]: row["val/speedup"] for row in rows(tmp_path) if "val/speedup" in row}
    assert len(validated) == 12
    assert best["step"] == max(validated, key=lambda step: (validated[step], -step)) < 4
    assert best["val/speedup"] == max(validated.values()) > 1.1 * validated[12]
    saved = weights(Run(tmp_path).best)
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    last = weights(Run(tmp_path).last)
    assert not torch.equal(last["draft.model.norm.weight"], saved["draft.model.norm.weight"])


def test_t43_a_window_longer_than_an_epoch_is_named(
    tmp_path: Path, t_tied: PreTrainedModel, dataset: ResponseDataset, caplog: pytest.LogCaptureFixture
) -> None:
    stage = STAGE.model_copy(update={"tokens_per_step": 256, "accumulate": 8, "max_steps": 4, "warmup_steps": 0})
    train(tmp_path, t_tied, dataset, recipe(stage))
    assert "accumulate = 8 is more than the" in caplog.text
    taken = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["step"] for row in taken] == [1, 2, 3, 4]
    assert taken[-1]["tok_seen"] == sum(row["num_tok"] for row in taken) > 4 * sum(dataset.num_supervised)
