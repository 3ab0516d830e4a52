"""Two processes (gloo) that each hold a part of the draft, against one: every kind of head and teacher, resumption.

They are forked from a server that has the imports, so that a case takes as long as its steps.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.adapt import add_lora
from distill.fit import checkpoint_step, fit
from distill.launch import Place
from distill.module import DraftModule
from distill.recipe import Recipe
from distill.runs import Interrupted, Run, Stop
from distill.schema import Draft, Eval, TrainerStage
from distill.schema_draft import Lora
from distill.sharded import take_rows
from distill.teacher import ResponseDataset
from distill.track import NullTracker
from distill.validation import Served, Validation
from tests.conftest import make_config, make_target
from tests.distill.test_fit import COSTS, SIZES, STAGE, SignalAt, rows
from tests.distill.test_module import write_answers

CASES = ("shortlist", "full", "untied", "low_rank", "lora", "live", "bf16", "packed")
STEPS = 6


def recipe(case: str, strategy: str) -> Recipe:
    stage = STAGE.model_copy(
        update={
            "max_steps": STEPS,
            "warmup_steps": 2,
            "validate_every": 3,
            "checkpoint_every": 2,
            "tokens_per_step": 48,
            "packing": case == "packed",
        }
        | {"accumulate": 2 if strategy == "single" else 1, "teacher": "live" if case == "live" else "hidden"}
    )
    return Recipe(
        name="tiny",
        seed=3,
        draft=Draft(num_layers=2),
        distill=stage,
        eval=Eval(k=(1, 2, 3)),
        trainer=TrainerStage(
            accelerator="cpu",
            strategy=strategy,  # type: ignore[arg-type]
            devices=1 if strategy == "single" else 2,
            precision="bf16-mixed" if case == "bf16" else "32-true",
        ),
    )


def train(
    case: str, strategy: str, folder: Path, answers: Path, place: Place, attempt: int, tracker: NullTracker
) -> DraftModule:
    """Trains in `folder`, from its newest checkpoint when `attempt` > 0."""
    settings = recipe(case, strategy)
    target = make_target()
    # A rank of 7, three key heads: not all divide evenly by two processes.
    config = make_config(tied=case != "untied", layers=2, hidden=48, heads=3, kv_heads=3)
    draft, factors = make_target(config, seed=5), None
    if case == "low_rank":
        generator = torch.Generator().manual_seed(1)
        factors = torch.randn(512, 7, generator=generator) / 3, torch.randn(7, 48, generator=generator) / 3
    if case == "lora":
        add_lora(draft, Lora(rank=3))
    shortlist = torch.arange(0, 509, 2) if case in ("shortlist", "lora") else None
    head = target.get_output_embeddings().weight.detach().clone()
    live = copy.deepcopy(target) if case == "live" else None
    module = DraftModule(draft, head, settings.distill, settings.seed, shortlist, factors, live=live)
    dataset = ResponseDataset(answers, max_length=40)
    validation = Validation(dataset, Served(COSTS, (1, 2, 3)), batch_tok=128, chunk_tok=32)
    run = Run(folder, attempt)
    with Stop().listening() as stop:
        fit(
            settings,
            run,
            module,
            dataset,
            validation,
            stop,
            tracker,
            run.newest_whole() if attempt else None,
            place=place,
        )
    return module


def work(case: str, strategy: str, folder: Path, answers: Path, place: Place, port: int, attempt: int, at: int) -> None:
    """One process; at step `at` the first one gets a signal, if that is not 0."""
    names = {"RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.num, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    tracker = SignalAt(at, signal.SIGTERM) if at else NullTracker()
    try:
        module = train(case, strategy, folder, answers, place, attempt, tracker)
    except Interrupted:
        os._exit(15)
    if place.rank == 0:
        assert not module.sharded
        model, factors = module.export()
        torch.save({"model": model.state_dict(), "factors": factors}, folder / "exported.pt")
    os._exit(0)


def start(case: str, strategy: str, folder: Path, answers: Path, attempt: int = 0, at: int = 0) -> None:
    """Trains in one process (strategy: single) or in two."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    num = 1 if strategy == "single" else 2
    places = [Place(rank, rank, num, num, "torchrun") for rank in range(num)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distill.test_sharded"])
    processes = [
        context.Process(target=work, args=(case, strategy, folder, answers, place, port, attempt, at))
        for place in places
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == (15 if at else 0)


def last(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("answers") / "a", make_target(), SIZES)


@pytest.mark.parametrize("case", CASES)
def test_parts_on_two_processes_are_the_whole_on_one(case: str, answers: Path, tmp_path: Path) -> None:
    start(case, "single", tmp_path / "one", answers)
    start(case, "fsdp", tmp_path / "two", answers)
    loose = case == "bf16"
    for expected, found in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        # In bf16 another order of sums moves single positions across an argmax.
        for name in expected.keys() & {"loss", "num_tok"} if loose else expected.keys() - {"step_ms", "tok_per_s"}:
            assert found[name] == pytest.approx(expected[name], rel=3e-2 if loose else 1e-4, abs=1e-5), name
    expected, found = last(tmp_path / "one"), last(tmp_path / "two")
    assert expected.keys() == found.keys()
    assert expected["state_dict"].keys() == found["state_dict"].keys()
    if not loose:
        # AdamW divides a gradient by its own size: where that is next to nothing another order of sums (and of one
        # processor's kernels) turns it by more than its rounding. A fiftieth of the way that a weight can have gone.
        for name, value in expected["state_dict"].items():
            torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-3, atol=0.02 * STAGE.lr * STEPS)
    whole, saved = (torch.load(tmp_path / name / "exported.pt", weights_only=True) for name in ("one", "two"))
    assert saved["model"].keys() == whole["model"].keys()
    assert (saved["factors"] is None) == (case != "low_rank")
    best = torch.load(tmp_path / "two" / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["model"]["model.norm.weight"], best["draft.model.norm.weight"])


@pytest.mark.parametrize(("case", "strategy"), [("shortlist", "fsdp"), ("low_rank", "fsdp"), ("shortlist", "ddp")])
def test_t42_a_resumed_run_of_two_is_the_same_run(case: str, strategy: str, answers: Path, tmp_path: Path) -> None:
    start(case, strategy, tmp_path / "whole", answers)
    start(case, strategy, tmp_path / "cut", answers, at=3)
    assert checkpoint_step(tmp_path / "cut" / "checkpoints" / "last.ckpt") == 3  # both stopped, one wrote
    start(case, strategy, tmp_path / "cut", answers, attempt=1)
    timed = ("attempt", "step_ms", "tok_per_s")
    trails = [
        [{key: value for key, value in row.items() if key not in timed} for row in rows(tmp_path / name)]
        for name in ("whole", "cut")
    ]
    assert json.dumps(trails[0]) == json.dumps(trails[1])
    expected, found = last(tmp_path / "whole"), last(tmp_path / "cut")
    assert all(torch.equal(found["state_dict"][name], value) for name, value in expected["state_dict"].items())
    ours, theirs = found["optimizer_states"][0]["state"], expected["optimizer_states"][0]["state"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[at][name], theirs[at][name]) for at in theirs for name in theirs[at])


def test_rows_of_a_whole_table_are_its_rows() -> None:
    table = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    found = take_rows(table, torch.tensor([3, 0]))
    assert torch.equal(found, table.detach()[[3, 0]])
    assert not found.requires_grad
