"""Published sizes of large targets, and the recipes for them: real classes on the meta device agree with --check."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from distill.counts import count
from distill.known import PRUNABLE
from distill.look import look
from distill.models import param_counts
from distill.prune import layer_plan, pruned_config
from distill.published import published_config, read_all
from distill.recipe import Recipe, load_recipe
from distill.shape import draft_size

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
FAMILIES = ("llama-3.1-8b", "qwen3-8b", "qwen3-32b", "qwen2.5-coder-7b", "mistral-7b", "gemma-3-12b")
IDS = [f"{path.parent.name}/{path.stem}" for path in RECIPES]


def build(settings: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**settings)


@cache
def sizes_of(model: str) -> tuple[int, int]:
    """(stored, read) of the class that transformers builds of the published config."""
    settings = published_config(model)
    assert settings is not None
    size = param_counts(build(settings))
    return size.stored, size.read


def test_every_target_has_its_three_recipes() -> None:
    assert [f"{family}/{domain}" for family in sorted(FAMILIES) for domain in ("code", "math", "qa")] == IDS


@pytest.mark.parametrize("facts", read_all(), ids=lambda facts: facts["config"]["architectures"][0])
def test_published_sizes_are_those_of_the_stock_class(facts: dict[str, Any]) -> None:
    assert facts["source"] and facts["models"]
    for model in facts["models"]:
        settings = published_config(model)
        assert settings is not None and settings["model_type"] in PRUNABLE and settings["eos_token_id"]
        assert count(settings) == sizes_of(model)
    stored = count(facts["config"])[0]
    tables = stored - count(facts["config"], 0)[1]
    for key, value in (("parameters", stored), ("without_embeddings", stored - tables)):
        stated = facts["published"].get(key)
        if stated is None:
            continue
        if stated.endswith("B"):
            digits = len(stated.removesuffix("B").partition(".")[2])
            # Makers round or cut the last digit.
            assert abs(value / 1e9 - float(stated.removesuffix("B"))) < 10**-digits, (key, value)
        else:
            assert value == int(stated)


def test_what_is_not_kept_is_not_guessed() -> None:
    assert published_config("owner/name") is None


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_the_draft_on_the_meta_device_has_the_share_that_check_prints(path: Path) -> None:
    recipe = load_recipe(path)
    text = "\n".join(look(recipe, str(path)))
    target = published_config(recipe.target.model)
    assert target is not None
    config = drafted(recipe, build(target))
    with torch.device("meta"):
        draft = AutoModelForCausalLM.from_config(config)
    assert {weight.device.type for weight in draft.parameters()} == {"meta"}
    size = draft_size(config, recipe.draft.head.size, recipe.draft.head.rank)
    stored, read = (mine / whole for mine, whole in zip((size.stored, size.read), sizes_of(recipe.target.model)))
    assert f"{size.stored / 1e6:.1f} M parameters stored ({stored:.1%} of the target's)" in text
    assert f"{size.read / 1e6:.1f} M read per drafted token ({read:.1%})" in text
    declared = stored if recipe.draft.size_count == "stored" else read
    assert 0.05 <= declared <= 0.10
    assert config.eos_token_id == target["eos_token_id"] and config.vocab_size == target["vocab_size"]
    assert config.rope_parameters == build(target).rope_parameters


def drafted(recipe: Recipe, target: PreTrainedConfig) -> PreTrainedConfig:
    stage = recipe.draft
    layers = layer_plan(target.num_hidden_layers, stage.layers, stage.num_layers)
    return pruned_config(target, layers, stage.hidden_size, stage.intermediate_size, stage.num_kv_heads)


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_check_takes_under_two_seconds_and_no_torch(path: Path) -> None:
    code = (
        f"import sys\nfrom distill.train import main\nassert main(['{path}', '--check']) == 0\n"
        "assert not {'torch', 'transformers', 'lightning', 'pyarrow'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time of the child: others may be using the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    for words in ("stored (", "read per drafted token", "on each of 8 processes (ddp)", "activations", "on disk"):
        assert words in done.stderr, words
    for words in ("minutes for 600 steps", "predicted for", "not measured", "hidden states on disk", "KV cache"):
        assert words in done.stderr, words
