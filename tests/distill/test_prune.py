"""Pruned drafts: loadable by stock classes, true to their config, and equal to the target where nothing is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from distill.importance import Importance, measure_importance, weight_importance
from distill.known import PRUNABLE, SUPPORTED
from distill.models import param_counts
from distill.prune import PruneError, layer_plan, prune, pruned_config
from distill.width import fold_hidden, main_directions
from tests.conftest import make_config, make_target

# Two float32 ways to the same function through six layers of widely spread weights: the last bits depend on the number
# of threads (3e-4 was seen); a wrong fold is off by more than 0.1.
ROUNDING = 1e-3

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
}
PRE_NORM = [name for name in CONFIGS if not name.startswith("gemma")]
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}


def test_the_types_that_can_be_cut_are_tried_here_and_supported():
    assert tuple(CONFIGS) == PRUNABLE
    assert set(PRUNABLE) < set(SUPPORTED)


def make_model(kind: str, tied: bool = False, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random six-layer model of a type, biases and norms included."""
    settings: dict[str, object] = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**(settings | changes))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                weight.normal_(0, 1.0 if "embed" in name or "lm_head" in name else 1.5 * weight.shape[1] ** -0.5)
    return model


def build(config: PreTrainedConfig, state: dict[str, Tensor]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(state, strict=True)
    return model.eval()


def logits(model: PreTrainedModel, length: int = 24, rows: int = 96) -> Tensor:
    ids = torch.randint(4, rows, (2, length), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def greedy(model: PreTrainedModel, use_cache: bool) -> list[int]:
    ids = torch.randint(4, 90, (1, 12), generator=torch.Generator().manual_seed(9))
    model.generation_config.eos_token_id = None
    out = model.generate(ids, do_sample=False, max_new_tokens=20, use_cache=use_cache)
    assert out.shape[1] == 32
    return out[0].tolist()


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 29]), (3, [0, 14, 29]), (4, [0, 10, 19, 29]), (30, list(range(30)))]
)
def test_layers_are_evenly_spaced_with_both_ends(count, expected):
    assert layer_plan(30, num_layers=count) == expected


@pytest.mark.parametrize("layers", [[], [5, 2, 0], [0, 0, 1], [0, 6], [-1, 2]])
def test_t62_bad_layers_are_refused(layers):
    with pytest.raises(PruneError, match=r"draft.layers .* in 0..5"):
        layer_plan(6, layers)


@pytest.mark.parametrize(("count", "message"), [(None, "needs draft.layers"), (0, r"1\.\.6"), (7, r"1\.\.6")])
def test_t62_bad_layer_counts_are_refused(count, message):
    with pytest.raises(PruneError, match=message):
        layer_plan(6, num_layers=count)


def test_layers_are_chosen_by_influence_or_from_the_ends():
    scores = torch.tensor([0.9, 0.2, 0.1, 0.2, 0.05, 0.5])
    assert layer_plan(6, num_layers=3, choose="influence", influence=scores) == [0, 1, 5]  # of equal ones the first
    assert layer_plan(6, num_layers=5, choose="influence", influence=scores) == [0, 1, 2, 3, 5]
    assert layer_plan(30, num_layers=3, choose="ends") == [0, 1, 29]
    assert layer_plan(30, num_layers=1, choose="ends") == [0]


def test_the_layer_that_does_least_goes_first():
    """Block influence of layers whose writes are scaled: the removal of the weakest changes the output least."""
    target = make_model("llama")
    with torch.no_grad():
        for number, scale in enumerate((1.0, 1e-3, 1.0, 1.0, 1e-4, 1.0)):
            target.model.layers[number].self_attn.o_proj.weight.mul_(scale)
            target.model.layers[number].mlp.down_proj.weight.mul_(scale)
    importance = measure_importance(target, [torch.randint(4, 96, (2, 30))])
    kept = layer_plan(6, num_layers=4, choose="influence", influence=importance.influence)
    assert kept == [0, 2, 3, 5]
    draft = build(*prune(target.config, target.state_dict(), kept))
    assert (logits(draft) - logits(target)).abs().mean() < 0.02 < 0.1 * logits(target).abs().mean()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_type_is_cut_to_a_model_that_stock_classes_load(kind, tied, tmp_path):
    target = make_model(kind, tied)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    config, state = prune(target.config, target.state_dict(), [0, 2, 5], intermediate_size=40, num_kv_heads=2)
    draft = build(config, state)
    assert (config.num_hidden_layers, config.intermediate_size) == (3, 40)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.eos_token_id == [2, 3] and config.vocab_size == 96
    uncached = greedy(draft, use_cache=False)
    assert greedy(draft, use_cache=True) == uncached
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert greedy(loaded, use_cache=True) == uncached
    torch.testing.assert_close(logits(loaded), logits(draft))
    assert (loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()) == tied
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, before[name]), name
        assert name not in state or state[name].data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("kind", CONFIGS)
def test_nothing_cut_is_nothing_changed(kind):
    target = make_model(kind)
    config, state = prune(target.config, target.state_dict(), range(6), 48, 80, 3)
    torch.testing.assert_close(logits(build(config, state)), logits(target))


def test_t02_rows_never_shrink(t_tied):
    config, state = prune(t_tied.config, t_tied.state_dict(), [0, 5], hidden_size=32)
    assert config.vocab_size == 512
    assert state["model.embed_tokens.weight"].shape == state["lm_head.weight"].shape == (512, 32)


def test_t10_kept_layers_are_renumbered(t_tied, tmp_path):
    draft = build(*prune(t_tied.config, t_tied.state_dict(), [0, 2, 5]))
    assert [layer.self_attn.layer_idx for layer in draft.model.layers] == [0, 1, 2]
    for new, old in enumerate([0, 2, 5]):
        kept, source = draft.model.layers[new].state_dict(), t_tied.model.layers[old].state_dict()
        assert all(torch.equal(kept[name], source[name]) for name in source)
    with_cache = greedy(draft, use_cache=True)
    assert with_cache == greedy(draft, use_cache=False)
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert greedy(loaded, True) == greedy(loaded, False) == with_cache


def test_t11_layer_lists_are_cut_to_the_kept_layers(tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 2 + ["sliding_attention", "full_attention"]
    target = make_model("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=8)
    draft = build(*prune(target.config, target.state_dict(), [0, 3, 5]))
    assert draft.config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    draft.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.layer_types == draft.config.layer_types
    assert target.config.layer_types == kinds


def test_t12_kv_groups_go_whole(t_kv3):
    scores = torch.tensor([[1.0, 3.0, 2.0]] * 6)
    importance = Importance(torch.ones(6, 128), scores, torch.eye(96), None, measured=True)
    config, state = prune(t_kv3.config, t_kv3.state_dict(), range(6), num_kv_heads=2, importance=importance)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    old, new = t_kv3.model.layers[3].self_attn, build(config, state).model.layers[3].self_attn
    # Groups 1 and 2 stay: query heads 2-5 (32 rows each pair), KV heads 1-2.
    assert torch.equal(new.q_proj.weight, old.q_proj.weight[32:])
    assert torch.equal(new.q_proj.bias, old.q_proj.bias[32:])
    assert torch.equal(new.k_proj.weight, old.k_proj.weight[16:])
    assert torch.equal(new.v_proj.weight, old.v_proj.weight[16:])
    assert torch.equal(new.o_proj.weight, old.o_proj.weight[:, 32:])
    with pytest.raises(PruneError, match="groups of 2"):
        pruned_config(t_kv3.config, range(6), num_heads=5)
    assert pruned_config(t_kv3.config, range(6), num_heads=4).num_key_value_heads == 2
    with pytest.raises(PruneError, match="do not go with"):
        pruned_config(t_kv3.config, range(6), num_heads=4, num_kv_heads=1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_t14_rope_frequencies_survive(kind, tmp_path):
    rope: object = YARN
    if kind == "gemma3_text":
        rope = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}
    target = make_model(kind, rope_parameters=rope)
    draft = build(*prune(target.config, target.state_dict(), [0, 5], num_kv_heads=1))
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = [name for name, _ in target.model.rotary_emb.named_buffers() if name.endswith("inv_freq")]
    assert names
    for model in (draft, loaded):
        for name in names:
            want, got = (getattr(m.model.rotary_emb, name) for m in (target, model))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    unscaled = make_model(kind, rope_parameters=None)
    assert any(
        not torch.equal(getattr(unscaled.model.rotary_emb, name), getattr(target.model.rotary_emb, name))
        for name in names
    )


def test_t15_positions_reach_as_far_as_the_targets(t_tied):
    assert pruned_config(t_tied.config, [0]).max_position_embeddings == 1024


@pytest.mark.parametrize("experts", [MixtralConfig, Qwen3MoeConfig])
def test_mixtures_of_experts_are_refused_by_name(experts):
    config = experts(num_hidden_layers=2)
    with pytest.raises(PruneError, match=rf"{config.model_type} is a mixture of experts"):
        pruned_config(config, [0])


def test_t17_other_types_are_refused_with_the_list():
    with pytest.raises(PruneError, match="'gpt2' cannot be pruned; supported: llama, qwen2"):
        pruned_config(GPT2Config(), [0])


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"hidden_size": 65}, r"hidden_size 65: must be in 1\.\.64"),
        ({"intermediate_size": 0}, r"intermediate_size 0: must be in 1\.\.128"),
        ({"num_kv_heads": 3}, r"num_key_value_heads 3: must be in 1\.\.2"),
    ],
)
def test_t62_sizes_beyond_the_target_are_refused(t_tied, wish, message):
    with pytest.raises(PruneError, match=message):
        pruned_config(t_tied.config, [0], **wish)


def test_a_width_that_stock_classes_refuse_is_refused_before_training():
    with pytest.raises(PruneError, match=r"32 with 6 query heads: .*not a multiple.* try draft.hidden_size 30"):
        pruned_config(make_model("llama").config, [0], hidden_size=32)
    assert pruned_config(make_model("llama").config, [0], hidden_size=32, num_kv_heads=2).hidden_size == 32


def test_a_narrower_gemma_is_refused():
    with pytest.raises(PruneError, match="gemma2 norms what its layers write"):
        pruned_config(make_model("gemma2").config, [0], hidden_size=32)


@pytest.mark.parametrize("measured", [True, False])
def test_idle_channels_and_groups_are_the_ones_that_go(measured):
    """Channels and a KV group whose output is multiplied by zero: their removal changes nothing."""
    target = make_model("llama")
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            layer.mlp.down_proj.weight[:, number : number + 40] = 0
            layer.self_attn.o_proj.weight[:, 16 * (number % 3) : 16 * (number % 3) + 16] = 0
            if not measured:
                layer.self_attn.q_proj.weight[16 * (number % 3) : 16 * (number % 3) + 16] = 0
    batches = [torch.randint(4, 96, (2, 30))]
    importance = measure_importance(target, batches) if measured else None
    config, state = prune(target.config, target.state_dict(), range(6), None, 40, 2, importance)
    torch.testing.assert_close(logits(build(config, state)), logits(target), rtol=1e-4, atol=1e-4)


def test_channels_that_a_text_never_uses_go_whatever_their_weights():
    target = make_model("llama")
    with torch.no_grad():
        for layer in target.model.layers:
            # silu(0) * up = 0: large weights, no activation.
            layer.mlp.gate_proj.weight[:40] = 0
            layer.mlp.up_proj.weight[:40] *= 50
            layer.mlp.down_proj.weight[:, :40] *= 50
    importance = measure_importance(target, [torch.randint(4, 96, (2, 30))])
    assert importance.ffn[:, :40].max() < importance.ffn[:, 40:].min()
    config, state = prune(target.config, target.state_dict(), range(6), intermediate_size=40, importance=importance)
    torch.testing.assert_close(logits(build(config, state)), logits(target), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_measured_importance_has_a_score_for_every_part(kind):
    target = make_model(kind)
    with torch.no_grad():
        for name, weight in target.model.layers[3].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
    importance = measure_importance(target, [torch.randint(4, 96, (2, 20)), torch.randint(4, 96, (1, 7))])
    assert importance.measured
    assert importance.ffn.shape == (6, 80) and importance.kv_heads.shape == (6, 3)
    assert importance.influence is not None and importance.influence.argmin() == 3
    assert importance.hidden.trace().item() == pytest.approx(48, rel=1e-4)
    assert not any(module._forward_pre_hooks for module in target.modules())
    with pytest.raises(ValueError, match="at least one token"):
        measure_importance(target, [])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", PRE_NORM)
def test_a_full_basis_changes_the_coordinates_and_nothing_else(kind, tied):
    target = make_model(kind, tied)
    basis = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(1))).Q
    config = pruned_config(target.config, range(6), untie_head=True)
    state = dict(target.state_dict())
    rotated = build(config, fold_hidden(config, state, basis, 1.0))
    torch.testing.assert_close(logits(rotated), logits(target), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("kind", PRE_NORM)
def test_a_stream_inside_a_subspace_is_folded_exactly(kind):
    """Everything that writes the stream stays in 30 of 48 directions, so the narrower draft is the same function."""
    target = make_model(kind, tied=False)
    inside = torch.linalg.qr(torch.randn(48, 30, generator=torch.Generator().manual_seed(2))).Q
    with torch.no_grad():
        table = target.model.embed_tokens.weight
        table.copy_(table @ inside @ inside.T)
        for name, weight in target.model.layers.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.copy_(inside @ (inside.T @ weight))
    importance = measure_importance(target, [torch.randint(4, 96, (4, 40))])
    config, state = prune(target.config, target.state_dict(), range(6), hidden_size=30, importance=importance)
    assert config.hidden_size == 30 and config.head_dim == 8
    torch.testing.assert_close(logits(build(config, state)), logits(target), rtol=ROUNDING, atol=ROUNDING)


def test_a_tied_narrow_draft_stays_tied_and_its_head_is_exact(caplog, tmp_path):
    """With final gains all alike, table and head agree and the fold is exact; else the head is the exact side."""
    target = make_model("llama", tied=True)
    with torch.no_grad():
        target.model.norm.weight.fill_(1.7)
    state = dict(target.state_dict())
    basis = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(1))).Q
    torch.testing.assert_close(
        logits(build(target.config, fold_hidden(target.config, state, basis, 1.0))),
        logits(target),
        rtol=ROUNDING,
        atol=ROUNDING,
    )
    state["model.norm.weight"] = torch.linspace(0.5, 2, 48)
    folded = fold_hidden(target.config, state, basis, 1.0)
    head = folded["lm_head.weight"] * folded["model.norm.weight"]
    torch.testing.assert_close(head, state["lm_head.weight"] * state["model.norm.weight"] @ basis)
    draft = build(*prune(target.config, target.state_dict(), [0, 5], hidden_size=30))
    assert "poor start" in caplog.text
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(logits(loaded), logits(draft))


def test_untying_gives_the_draft_a_head_of_its_own():
    target = make_model("llama", tied=True)
    config, state = prune(target.config, target.state_dict(), [0, 5], hidden_size=30, untie_head=True)
    assert not config.tie_word_embeddings
    draft = build(config, state)
    assert not torch.equal(draft.lm_head.weight, draft.model.embed_tokens.weight)


def test_main_directions_are_ordered_and_tell_their_energy():
    moment = torch.diag(torch.tensor([1.0, 5.0, 3.0, 1.0]))
    basis, energy = main_directions(moment, 2)
    assert energy == pytest.approx(0.8)
    torch.testing.assert_close(basis.abs(), torch.eye(4)[:, [1, 2]])


def test_size_is_known_before_any_weight_and_agrees_with_the_model(t_tied, t_untied):
    for target in (t_tied, t_untied):
        config = pruned_config(target.config, [0, 3], hidden_size=32, intermediate_size=64, num_kv_heads=1)
        state = prune(target.config, target.state_dict(), [0, 3], 32, 64, 1)[1]
        model = build(config, state)
        table = 512 * 32
        stored = sum(weight.numel() for weight in model.parameters())
        body = stored - table * (1 if config.tie_word_embeddings else 2)
        assert param_counts(config).stored == stored
        assert param_counts(config).read == body + table
        assert param_counts(config, 100).read == body + 100 * 32


def test_t48_tied_state_holds_one_matrix_and_stores_it_once(tmp_path):
    target = make_target(make_config())
    config, state = prune(target.config, target.state_dict(), [0, 5])
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    without_head = {name: weight for name, weight in target.state_dict().items() if name != "lm_head.weight"}
    assert "lm_head.weight" in prune(target.config, without_head, [0, 5])[1]
    draft = build(config, state)
    draft.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (not a dict)
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


def test_bf16_targets_stay_bf16(t_tied):
    target = copy.deepcopy(t_tied).bfloat16()
    _, state = prune(target.config, target.state_dict(), [0, 5], hidden_size=32, intermediate_size=64)
    assert all(weight.dtype == torch.bfloat16 for weight in state.values())


def test_weight_importance_scores_products_of_norms():
    target = make_model("llama")
    importance = weight_importance(target.config, target.state_dict())
    mlp = target.model.layers[2].mlp
    want = mlp.gate_proj.weight[7].norm() * mlp.up_proj.weight[7].norm() * mlp.down_proj.weight[:, 7].norm()
    torch.testing.assert_close(importance.ffn[2, 7], want.detach())
    assert importance.influence is None and not importance.measured
