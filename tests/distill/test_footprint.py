"""Memory before training: parts against real optimizers and real saved tensors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill import attention
from distill.counts import count, layer_matrices
from distill.footprint import activation_bytes, footprint
from distill.optimizers import make_optimizer
from distill.recipe import Recipe, load_recipe
from tests.distill.test_prune import CONFIGS

TOKENS = 1024  # shorter bf16 rows take another way on a CPU, which keeps the products of queries and keys
SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def built(kind: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = CONFIGS[kind](**SHAPE)
    return AutoModelForCausalLM.from_config(config), json.loads(config.to_json_string(use_diff=False))


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(
        "name: small\ndraft: {num_layers: 3, size_frac: [0, 1]}\n"
        "target: {dtype: bfloat16}\ntrainer: {precision: bf16-mixed}\n"  # whatever this machine multiplies
    )
    return load_recipe(tmp_path / "recipe.yaml", overrides)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizer_holds_what_is_said(optimizer: str, tmp_path: Path) -> None:
    draft, settings = built("llama")
    found = recipe(tmp_path, f"distill.optimizer={optimizer}")
    tables = [draft.get_input_embeddings().weight, draft.get_output_embeddings().weight]
    made = make_optimizer(draft.parameters(), tables, found.distill, 1e-3)
    for weight in draft.parameters():
        weight.grad = torch.ones_like(weight)
    made.step()
    held = sum(
        value.numel() * value.element_size()
        for state in made.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    told = footprint(found, found.draft, settings, settings)
    assert told.optimizer == held
    assert told.weights == told.gradients == 4 * sum(weight.numel() for weight in draft.parameters())
    assert layer_matrices(settings) * 3 == sum(w.numel() for w in draft.model.layers.parameters() if w.dim() == 2)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_activations_are_what_a_real_forward_pass_keeps(kind: str, mixed: bool) -> None:
    draft, settings = built(kind)
    attention.use(draft)
    own = {weight.untyped_storage().data_ptr() for weight in draft.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # or a later tensor could take its place in memory
        return tensor

    def saved(rows: int) -> int:
        kept.clear()
        ids = torch.zeros(rows, TOKENS, dtype=torch.long)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=mixed),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            out = draft.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        alive.append(out)
        return sum(kept.values())

    alive: list[torch.Tensor] = []
    # The difference leaves out what does not grow with the batch: bf16 copies of weights, tables of angles.
    per_token = (saved(3) - saved(1)) / (2 * TOKENS)
    assert activation_bytes(settings, mixed) == pytest.approx(per_token, rel=0.1)


def test_teachers_processes_and_updates_have_their_parts(tmp_path: Path) -> None:
    _, target = built("llama")
    target = {**target, "num_hidden_layers": 30}
    config = {**target, "num_hidden_layers": 3}
    base = recipe(tmp_path)
    one = footprint(base, base.draft, target, config)
    assert one.teacher == 2 * 96 * 64 and one.buckets == 0 and one.sent_bytes == 0
    live = recipe(tmp_path, "distill.teacher=live")
    # The target, and the copy of its head that the loss reads.
    assert footprint(live, live.draft, target, config).teacher == 2 * count(target)[0] + one.teacher
    assert footprint(live, live.draft, target, config).flops > one.flops
    both = footprint(base, base.draft, target, config, reference=config)
    assert both.teacher == one.teacher + 4 * count(config)[0]
    many = recipe(tmp_path, "trainer.devices=4")
    four = footprint(many, many.draft, target, config)
    assert four.total - one.total == four.buckets == one.gradients
    assert four.sent_bytes == pytest.approx(2 * one.gradients * 3 / 4)
    sharded = many.model_copy(update={"trainer": many.trainer.model_copy(update={"strategy": "fsdp"})})
    quarter = footprint(sharded, many.draft, target, config)
    assert (quarter.weights, quarter.optimizer, quarter.buckets) == (one.weights / 4, one.optimizer / 4, 0)
    lora = recipe(tmp_path, "draft.lora={rank: 2}")
    updated = footprint(lora, lora.draft, target, config)
    assert updated.trained < one.trained / 10 and updated.optimizer == 8 * updated.trained
    twice = copy.deepcopy(base).model_copy(update={"distill": base.distill.model_copy(update={"accumulate": 2})})
    assert footprint(twice, base.draft, target, config).flops == 2 * one.flops
    assert footprint(twice, base.draft, target, config).total == one.total


def test_a_sharded_teacher_counts_by_its_part_a_replicated_one_whole(tmp_path: Path) -> None:
    """Worked by hand. A layer: q and o 2 x 64 x 64, k and v 2 x 64 x 32, ffn 3 x 64 x 160, norms 128: 43,136."""
    _, target = built("llama")
    target = {**target, "num_hidden_layers": 30, "tie_word_embeddings": False}
    config = {**target, "num_hidden_layers": 3}
    assert count(target)[0] == 30 * 43_136 + 64 + 2 * 96 * 64 == 1_306_432
    wanted = ("distill.teacher=live", "trainer.devices=4")
    whole = recipe(tmp_path, *wanted, "trainer.strategy=ddp")
    every = footprint(whole, whole.draft, target, config)
    assert every.teacher == 2 * 1_306_432 + 2 * 6_144 == 2_625_152  # bf16; the loss's copy of the head beside it
    assert every.gathered == 0
    cut = recipe(tmp_path, *wanted, "trainer.strategy=fsdp")
    part = footprint(cut, cut.draft, target, config)
    # The head of its own is dropped for the loss's copy, which is whole in every process; a quarter of all else.
    assert part.teacher == 2 * 1_300_288 / 4 + 2 * 6_144 == 662_432
    tied = {**target, "tie_word_embeddings": True}
    assert footprint(cut, cut.draft, tied, config).teacher == 662_432  # the embedding is cut in any case
    # Whole while it runs: the draft's embedding and two of its layers in float32, more than the target's in bf16.
    assert part.gathered == 4 * (6_144 + 2 * 43_136) == 369_664
    large = {**target, "num_hidden_layers": 4, "intermediate_size": 1_600}
    assert footprint(cut, cut.draft, large, config).gathered == 2 * (6_144 + 2 * (43_136 + 3 * 64 * 1_440)) == 1_290_752
    assert footprint(cut, cut.draft, target, {**config, "num_hidden_layers": 1}).gathered == 4 * (6_144 + 43_136)
    cached = recipe(tmp_path, "trainer.devices=4", "trainer.strategy=fsdp")
    own = footprint(cached, cached.draft, target, config)
    assert own.teacher == 2 * 6_144  # the head alone, as with one process
    assert part.sent_bytes - own.sent_bytes == 2 * 1_300_288 * 3 / 4
    assert part.total - own.total == 2 * 1_300_288 / 4
