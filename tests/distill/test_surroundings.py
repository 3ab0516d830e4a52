"""What a run finds around it, asked before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distill.recipe import load_recipe
from distill.runs import RunError
from distill.surroundings import choose_device, slow_products, stay_offline
from tests.distill.test_train import write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def test_more_processes_than_gpus_are_refused_before_the_answers(world: Path) -> None:
    def device(num_gpus: int, *overrides: str) -> str:
        return choose_device(load_recipe(world / "recipe.yaml", overrides), num_gpus)

    with pytest.raises(RunError, match=r"trainer\.devices = 3: one CUDA device each, and 2 of them are there"):
        device(2, "trainer.devices=3", "trainer.accelerator=auto")
    with pytest.raises(RunError, match="no CUDA device is there"):
        device(0, "trainer.accelerator=cuda")
    assert device(2, "trainer.devices=2", "trainer.accelerator=cuda") == "cuda"
    assert device(2, "trainer.devices=3", "trainer.accelerator=cpu") == "cpu"
    assert device(0, "trainer.devices=3", "trainer.accelerator=auto") == "cpu"


def test_a_cpu_without_bf16_products_is_told_which_keys_cost_it(world: Path) -> None:
    def told(device: str, has_bf16: bool, dtype: str, precision: str) -> str | None:
        recipe = load_recipe(world / "recipe.yaml", [f"target.dtype={dtype}", f"trainer.precision={precision}"])
        return slow_products(recipe, device, has_bf16)

    both = told("cpu", False, "bfloat16", "bf16-mixed")
    assert both is not None and both.endswith("set trainer.precision=32-true target.dtype=float32")
    one = told("cpu", False, "float32", "bf16-mixed")
    assert one is not None and one.endswith("set trainer.precision=32-true")
    assert told("cpu", False, "float32", "32-true") is None
    assert told("cpu", True, "bfloat16", "bf16-mixed") is None
    assert told("cuda", False, "bfloat16", "bf16-mixed") is None


@pytest.mark.parametrize(
    ("overrides", "offline"),
    [
        ([], True),
        (["target.model=smollm2-135m-instruct"], True),
        (["target.model=owner/name"], False),
        (["traffic.train=owner/dataset"], False),
    ],
)
def test_the_hub_is_forbidden_only_where_it_is_not_needed(
    overrides: list[str], offline: bool, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    stay_offline(load_recipe(world / "recipe.yaml", overrides))
    assert (os.environ.get("HF_HUB_OFFLINE") == "1") == offline
