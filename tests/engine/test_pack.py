"""Packed linear layers: equal to the plain ones, never stale, and out of the way of gradients and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from engine.pack import PackedLinear, pack_linears, pays

pytestmark = pytest.mark.skipif(not pays(torch.zeros(1, dtype=torch.bfloat16)), reason="no bf16 products in this CPU")


def packed_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, bias=bias).bfloat16()
    pack_linears(nn.Sequential(layer))
    assert type(layer) is PackedLinear
    return layer


@pytest.mark.parametrize("shape", [(1, 96), (5, 96), (2, 3, 96), (130, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = packed_layer(bias), torch.randn(shape).bfloat16()
    with torch.inference_mode():
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))


def test_a_changed_weight_is_packed_again() -> None:
    layer, x = packed_layer(), torch.randn(4, 96).bfloat16()
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias)) and not torch.equal(layer(x), before)
        layer.load_state_dict({"weight": torch.ones(64, 96), "bias": torch.zeros(64)})
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))


def test_gradients_and_other_precisions_take_the_plain_path() -> None:
    layer, x = packed_layer(), torch.randn(4, 96).bfloat16()
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0
    layer.float()
    with torch.inference_mode():
        assert layer(x.float()).dtype == torch.float32


def test_copies_and_pickles_pack_their_own() -> None:
    layer, x = packed_layer(), torch.randn(4, 96).bfloat16()
    with torch.no_grad():
        layer(x)
        twin, other = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        layer.weight.zero_()
        for copied in (twin, other):
            assert torch.equal(copied(x), linear(x, copied.weight, copied.bias)) and copied(x).abs().sum() > 0


def test_only_plain_bf16_layers_are_packed() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16())
    pack_linears(model)
    assert [type(layer).__name__ for layer in model] == ["Linear", "Own", "PackedLinear"]
    assert set(model.state_dict()) == {f"{i}.{n}" for i in range(3) for n in ("weight", "bias")}
