"""Packed linear layers: equal to the plain ones, never stale, and out of the way of gradients and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.pack import PackedLinear, pack_linears, pays

LOW = pays(torch.zeros(1, dtype=torch.bfloat16))  # else float32 is what this CPU packs
SERVED, OTHER = (torch.bfloat16, torch.float32) if LOW else (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch packs nothing")


def same(ours: Tensor, plain: Tensor) -> bool:
    """bf16 kernels agree to the bit; float32's add in another order."""
    return torch.equal(ours, plain) if LOW else torch.allclose(ours, plain, rtol=1e-5, atol=1e-5)


def packed_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, bias=bias).to(SERVED)
    pack_linears(nn.Sequential(layer))
    assert type(layer) is PackedLinear
    return layer


@pytest.mark.parametrize("shape", [(1, 96), (5, 96), (2, 3, 96), (130, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = packed_layer(bias), torch.randn(shape).to(SERVED)
    with torch.inference_mode():
        assert same(layer(x), linear(x, layer.weight, layer.bias))


def test_a_changed_weight_is_packed_again() -> None:
    layer, x = packed_layer(), torch.randn(4, 96).to(SERVED)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert same(layer(x), linear(x, layer.weight, layer.bias)) and not torch.equal(layer(x), before)
        layer.load_state_dict({"weight": torch.ones(64, 96), "bias": torch.zeros(64)})
        assert same(layer(x), linear(x, layer.weight, layer.bias))


def test_gradients_and_other_precisions_take_the_plain_path() -> None:
    layer, x = packed_layer(), torch.randn(4, 96).to(SERVED)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0
    layer.to(OTHER)
    with torch.inference_mode():
        assert layer(x.to(OTHER)).dtype == OTHER
        assert torch.equal(layer(x.to(OTHER)), linear(x.to(OTHER), layer.weight, layer.bias))


def test_copies_and_pickles_pack_their_own() -> None:
    layer, x = packed_layer(), torch.randn(4, 96).to(SERVED)
    with torch.no_grad():
        layer(x)
        twin, other = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        layer.weight.zero_()
        for copied in (twin, other):
            assert same(copied(x), linear(x, copied.weight, copied.bias)) and copied(x).abs().sum() > 0


@pytest.mark.skipif(LOW, reason="what rounds alike is float32, which this CPU does not pack")
@pytest.mark.parametrize("num", [1, 2, 5, 8, 33])
def test_a_row_is_the_same_beside_any_number_of_others(num: int) -> None:
    """So that in float32 a verified token's logits are those of a step of its own, to the bit."""
    layer, x = packed_layer(), torch.randn(64, 96).to(SERVED)
    with torch.inference_mode():
        assert torch.equal(layer(x[:num]), layer(x)[:num])


def test_only_plain_layers_of_the_served_precision_are_packed() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4).to(OTHER), Own(4, 4).to(SERVED), nn.Linear(4, 4).to(SERVED))
    pack_linears(model)
    assert [type(layer).__name__ for layer in model] == ["Linear", "Own", "PackedLinear"]
    assert set(model.state_dict()) == {f"{i}.{n}" for i in range(3) for n in ("weight", "bias")}
