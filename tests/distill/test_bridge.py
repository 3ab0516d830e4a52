"""The closed-form bridge: the fold equals the formula, helps on text it has not seen, and changes one matrix alone."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.bridge import _head_map, bridge
from distill.losses import divergence
from distill.prune import prune
from distill.teacher import Batch, ResponseDataset
from tests.conftest import make_config, make_target
from tests.distill.test_module import write_answers

CUT = [0, 3, 5]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Layers that each change a little, as in a trained model; a random one's final state is beyond any linear map."""
    model = make_target(make_config(tied=False))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.15)
    return model


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel) -> ResponseDataset:
    draw = random.Random(0)
    sizes = [(draw.randint(4, 20), draw.randint(20, 40)) for _ in range(60)]
    return ResponseDataset(write_answers(tmp_path_factory.mktemp("answers") / "a", target, sizes), max_length=80)


def cut(target: PreTrainedModel, **widths: int) -> PreTrainedModel:
    config, state = prune(target.config, target.state_dict(), CUT, **widths)
    draft = AutoModelForCausalLM.from_config(config)
    draft.load_state_dict(state)
    return draft.eval()


def batches(dataset: ResponseDataset, rows: range) -> list[Batch]:
    return [dataset.collate([row]) for row in rows]


@torch.no_grad()
def final(draft: PreTrainedModel, batch: Batch) -> Tensor:
    return draft.model(batch.input_ids).last_hidden_state[batch.positions[:, 0], batch.positions[:, 1]]


@torch.no_grad()
def loss(draft: PreTrainedModel, target: PreTrainedModel, given: list[Batch]) -> float:
    hidden = torch.cat([final(draft, batch) for batch in given])
    wanted = torch.cat([batch.hidden_target for batch in given]).float()
    return float(divergence("forward_kl", wanted @ target.lm_head.weight.T, draft.lm_head(hidden)).mean())


@pytest.mark.parametrize("widths", [{}, {"intermediate_size": 96}, {"hidden_size": 48, "num_kv_heads": 1}])
def test_the_loss_before_training_falls_on_unseen_answers(
    widths: dict[str, int], target: PreTrainedModel, dataset: ResponseDataset
) -> None:
    draft, seen, unseen = cut(target, **widths), batches(dataset, range(50)), batches(dataset, range(50, 60))
    before = loss(draft, target, unseen)
    found = bridge(draft, target.lm_head.weight.detach(), seen, 10_000)
    assert found.num_tok == sum(len(batch.labels) for batch in seen)
    assert found.error_after < found.error_before
    assert loss(draft, target, unseen) < 0.9 * before


def test_the_folded_model_is_the_unfolded_computation(target: PreTrainedModel, dataset: ResponseDataset) -> None:
    """The stream of the cut draft plus dD times its last channels, normed: what the folded model says."""
    draft, batch = cut(target), dataset.collate([55])
    folded = copy.deepcopy(draft)
    bridge(folded, target.lm_head.weight.detach(), batches(dataset, range(50)), 10_000)
    delta = folded.model.layers[-1].mlp.down_proj.weight - draft.model.layers[-1].mlp.down_proj.weight
    seen: dict[str, Tensor] = {}
    draft.model.norm.register_forward_pre_hook(lambda _, args: seen.__setitem__("stream", args[0]))
    draft.model.layers[-1].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.__setitem__("a", args[0]))
    with torch.no_grad():
        draft.model(batch.input_ids)
        unfolded = draft.model.norm(seen["stream"] + seen["a"] @ delta.T)
    at = batch.positions[:, 0], batch.positions[:, 1]
    torch.testing.assert_close(final(folded, batch), unfolded[at], rtol=1e-4, atol=1e-4)
    for name, weight in folded.state_dict().items():
        assert ("layers.2.mlp.down_proj" in name) == (not torch.equal(weight, draft.state_dict()[name])), name


def test_a_draft_that_is_already_the_target_is_left_almost_as_it_is(
    target: PreTrainedModel, dataset: ResponseDataset
) -> None:
    draft = copy.deepcopy(target)
    found = bridge(draft, target.lm_head.weight.detach(), batches(dataset, range(50)), 10_000)
    assert found.error_before < 1e-3  # the states are stored in bf16
    assert loss(draft, target, batches(dataset, range(50, 60))) < 0.02


def test_a_channel_that_the_final_norm_switches_off_moves_nothing(
    target: PreTrainedModel, dataset: ResponseDataset
) -> None:
    draft = cut(target)
    with torch.no_grad():
        draft.model.norm.weight[7] = 0.0
    old = draft.model.layers[-1].mlp.down_proj.weight.clone()
    bridge(draft, target.lm_head.weight.detach(), batches(dataset, range(50)), 10_000)
    new = draft.model.layers[-1].mlp.down_proj.weight
    assert torch.equal(new[7], old[7]) and not torch.equal(new[8], old[8])
    assert new.isfinite().all()


def test_heads_of_one_matrix_need_no_map_and_others_get_the_least_squares_one() -> None:
    generator = torch.Generator().manual_seed(0)
    own, turn = torch.randn(40, 6, generator=generator), torch.randn(6, 9, generator=generator)
    assert _head_map(own, torch.cat([own, torch.zeros(8, 6)])) is None
    found = _head_map(own, own @ turn)
    assert found is not None
    torch.testing.assert_close(found, turn, rtol=1e-3, atol=1e-3)


def test_one_batch_is_too_little(target: PreTrainedModel, dataset: ResponseDataset) -> None:
    with pytest.raises(ValueError, match="at least 2 are needed"):
        bridge(cut(target), target.lm_head.weight.detach(), batches(dataset, range(1)), 100)
