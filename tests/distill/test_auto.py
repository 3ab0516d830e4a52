"""target.dtype and trainer.precision: auto."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine.pack
from distill.auto import cpu_has_bf16, has_gpu, settle
from distill.recipe import dump, load_recipe
from distill.schema import Recipe

SMALL = "name: small\ndraft: {num_layers: 1}\n"
LOW, HIGH = ("bfloat16", "bf16-mixed"), ("float32", "32-true")


def write(folder: Path, text: str = SMALL) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def formats(recipe: Recipe) -> tuple[str, str]:
    return recipe.target.dtype, recipe.trainer.precision


def test_a_recipe_that_was_read_names_what_this_machine_multiplies(tmp_path: Path) -> None:
    here = LOW if has_gpu() or engine.pack.cpu_has_bf16() else HIGH
    recipe = load_recipe(write(tmp_path))
    assert formats(recipe) == here
    assert formats(load_recipe(write(tmp_path), ["target.dtype=auto", "trainer.precision=auto"])) == here
    (tmp_path / "resolved.json").write_text(dump(recipe))
    assert "auto" not in {recipe.target.dtype, recipe.trainer.precision}
    assert load_recipe(tmp_path / "resolved.json") == recipe  # a run keeps what it was started with


@pytest.mark.parametrize("bf16", [True, False])
def test_what_is_named_stays(bf16: bool, tmp_path: Path) -> None:
    overrides = ["target.dtype=float16", "trainer.precision=32-true"]
    assert formats(settle(load_recipe(write(tmp_path), overrides), bf16)) == ("float16", "32-true")
    blank = Recipe.model_validate({"name": "small", "draft": {"num_layers": 1}})
    assert formats(blank) == ("auto", "auto")
    assert formats(settle(blank, bf16)) == (LOW if bf16 else HIGH)
    half = blank.model_copy(update={"target": blank.target.model_copy(update={"dtype": "float32"})})
    assert formats(settle(half, bf16)) == ("float32", LOW[1] if bf16 else HIGH[1])


def test_what_auto_stood_for_is_not_written_into_a_recipe(tmp_path: Path) -> None:
    """A race that is written here must not pin this machine's precision for another one."""
    for text in (SMALL, SMALL + "target: {revision: x}\ntrainer: {precision: auto, devices: 1}\n"):
        given = load_recipe(write(tmp_path, text)).model_dump(exclude_unset=True)
        assert "dtype" not in given.get("target", {}) and "precision" not in given.get("trainer", {})
        assert ("target" in given) == ("target" in text)
    kept = load_recipe(write(tmp_path), ["target.dtype=float32"]).model_dump(exclude_unset=True)
    assert kept["target"] == {"dtype": "float32"} and "trainer" not in kept


def test_a_recipe_for_a_gpu_is_in_bf16_wherever_it_is_read(tmp_path: Path) -> None:
    assert formats(load_recipe(write(tmp_path), ["trainer.gpu=h200"])) == LOW
    assert formats(load_recipe(write(tmp_path), ["trainer.accelerator=cuda"])) == LOW


def test_the_processor_is_asked_as_torch_asks_it() -> None:
    assert cpu_has_bf16() == engine.pack.cpu_has_bf16()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse avx avx2 fma\nbugs\t\t: none\n", False),
        ("flags\t\t: avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_bf16\n", True),
        ("Features\t: fp asimd sve bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("no such line\n", False),
    ],
)
def test_flags_of_processors(text: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_has_bf16(tmp_path / "cpuinfo") == found
    assert not cpu_has_bf16(tmp_path / "missing")


def test_a_gpu_that_is_hidden_is_none(tmp_path: Path) -> None:
    assert not has_gpu(tmp_path, {})
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu(tmp_path, {})
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path, {}) and has_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert not has_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) and not has_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"})
