"""Trials of the recipe: what does not exist is refused by name, and no message buries its point."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.models import ModelUnavailable, resolve
from distill.recipe import RecipeError, load_recipe
from distill.traffic import load_prompts
from eval.setup import device_of

SMALL = "name: small\ndraft: {layers: [0, 2, 5]}\n"


def refused(folder: Path, *overrides: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(SMALL)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "override, said",
    [
        ("draft.intermediate_size=[128, 96, 96, 64, 64, 64]", "allowed is a whole number >= 1 or null"),  # T13
        ("eval.repetition_penalty=1.3", "eval.repetition_penalty is no key here"),  # T41
        ("responses.repetition_penalty=1.3", "responses.repetition_penalty is no key here"),  # T41
        ("draft.vocab_size=64", "draft.vocab_size is no key here"),  # T09: the head is cut by draft.head instead
        ("draft.rope_scaling={type: linear}", "draft.rope_scaling is no key here"),  # T14
        ("distill.betas=[0.9]", "distill.betas = [0.9]: allowed is a list of 2"),
        ("traffic.train={a: 1}", 'traffic.train = {"a": 1}: allowed is a non-empty text or a non-empty list'),
        ("draft.layers={a: 1}", 'draft.layers = {"a": 1}: allowed is a non-empty list'),
        ("traffic.system=!!float x", "not valid YAML"),
        ("distill.betas=[]", "distill.betas = []: allowed is a list of 2"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(tmp_path: Path, override: str, said: str) -> None:
    """T13 (one width for all layers), T41 (penalties), T51 (compiled modules) and keys of other tools."""
    assert said in refused(tmp_path, override)


def test_long_values_do_not_bury_the_message(tmp_path: Path) -> None:
    """T62: 300 wrong items and a text of 9,000 characters were echoed whole, once for each item."""
    many = f"traffic.heldout={list(range(300))}"
    message = refused(tmp_path, many, f"target.dtype={'x' * 9000}")
    assert len(message) < 20_000 and "and 281 more" in message
    assert "float32 | bfloat16 | float16" in refused(tmp_path, f"target.dtype={'x' * 9000}")
    assert len(refused(tmp_path, f"target.dtype={'x' * 9000}")) < 1500


def test_odd_paths_are_paths(tmp_path: Path) -> None:
    """T62: names with brackets, stars, blanks and other scripts are files, not patterns; ~ of nobody is no crash."""
    folder = tmp_path / "räume [1] 漢字 *"
    folder.mkdir()
    for name in ("a [x].jsonl", "b.jsonl"):
        (folder / name).write_text(f'{{"prompt": "say {name}", "domain": "code"}}\n')
    path = folder / "recipe 1.yaml"
    path.write_text(SMALL)
    recipe = load_recipe(path, [f'traffic.train="{folder}/a [x].jsonl"', f'traffic.heldout="{folder}/b.jsonl"'])
    (prompt,) = load_prompts(recipe.traffic, "train", 0)
    assert prompt.messages[0]["content"] == "say a [x].jsonl"
    with pytest.raises(RecipeError, match="reads"):
        load_recipe(path, [f'traffic.train="{folder}/b.jsonl"', f'traffic.heldout="{folder}/../{folder.name}/b.jsonl"'])
    assert load_recipe(path, ["traffic.train=~nobody-here/x.jsonl"]).traffic.train == "~nobody-here/x.jsonl"


@pytest.mark.parametrize("name", ["~nobody-here/x/y", "x" * 5000, "a\0b", "../" * 2000])
def test_names_that_no_path_can_have_are_refused(name: str) -> None:
    """T53: what is no folder and no hub id is one message, not an error of the file system."""
    with pytest.raises(ModelUnavailable):
        resolve(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_cuda_is_not_replaced_by_the_cpu(tmp_path: Path) -> None:
    """T69: without a GPU the accelerator cuda is refused; auto and cpu say cpu."""
    (tmp_path / "recipe.yaml").write_text(SMALL)
    with pytest.raises(ValueError, match="no CUDA device is there"):
        device_of(load_recipe(tmp_path / "recipe.yaml", ["trainer.accelerator=cuda"]))
    for word in ("cpu", "auto"):
        assert device_of(load_recipe(tmp_path / "recipe.yaml", [f"trainer.accelerator={word}"])) == "cpu"
