"""The roofline: its arithmetic by hand, and its number of operations counted in the engine's own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from distill.counts import count, kv_bytes
from distill.devices import Device
from distill.roofline import LAYER_OPS, STEP_OPS, predict_costs, step_ms
from engine import costs as model
from engine.model import Runner
from tests.distill.test_prune import CONFIGS

SHAPE = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 8,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, **SHAPE}


def device(**changes: Any) -> Device:
    given = {
        "name": "made up", "memory_bytes": 1e9, "bandwidth": 1e6, "flops": 1e12, "link": 1e9, "bandwidth_frac": 0.5,
        "compute_frac": 0.5, "train_frac": 0.5, "launch_ms": 0.0, "replay_ms": 0.0, "host_ms": 0.0,
    }  # fmt: skip
    return Device(**(given | changes))


def test_a_step_reads_its_weights_and_keys() -> None:
    weights = count(LLAMA)[1]
    assert step_ms(device(), LLAMA, 1, 1, 0) == pytest.approx(1e3 * 2 * weights / 0.5e6)
    more = step_ms(device(), LLAMA, 3, 1, 100) - step_ms(device(), LLAMA, 3, 1, 0)
    assert more == pytest.approx(1e3 * 300 * kv_bytes(LLAMA, 2) / 0.5e6)


def test_wide_passes_turn_to_products_and_small_operations_are_added() -> None:
    slow = device(flops=1e9)
    tokens = 64
    attention = 4 * 4 * 48 * tokens  # 4 layers, 48 wide queries, one new row against its own tokens
    wanted = 1e3 * tokens * (2 * count(LLAMA)[1] + attention) / 0.5e9
    assert step_ms(slow, LLAMA, 1, tokens, 0) == pytest.approx(max(wanted, step_ms(device(), LLAMA, 1, 1, 0)))
    ops = 4 * LAYER_OPS["llama"] + STEP_OPS
    assert step_ms(device(replay_ms=0.5), LLAMA, 1, 1, 0) == pytest.approx(step_ms(device(), LLAMA, 1, 1, 0) + ops / 2)
    # The host launches beside the device's work: only the longer of the two is seen.
    assert step_ms(device(launch_ms=100.0), LLAMA, 1, 1, 0, eager=True) == pytest.approx(100 * ops)


def test_costs_are_marked_and_in_the_form_of_measured_ones() -> None:
    draft = {**LLAMA, "num_hidden_layers": 1}
    costs = predict_costs(device(host_ms=1.0, replay_ms=0.01), LLAMA, draft, (32, None), 4, 50, 2, "small", (1.1, 1.3))
    assert costs.device == "made up (predicted)" and costs.draft == "small" and costs.ks == [1, 2, 3, 4]
    plain = predict_costs(device(host_ms=1.0, replay_ms=0.01), LLAMA, draft, (32, None), 4, 50, 2)
    assert costs.t_ms == pytest.approx(1.3 * plain.t_ms) and costs.V_ms[2] == pytest.approx(1.1 * plain.V_ms[2])
    assert costs.V_ms[0] == plain.V_ms[0] and plain.T_ms == pytest.approx(plain.V_ms[0] + 1.0 + plain.S_ms)
    assert model.Costs.from_json(costs.to_json()) == costs


def test_what_is_not_described_is_refused() -> None:
    with pytest.raises(ValueError, match="no prediction for model type 'mixtral'"):
        step_ms(device(), {**LLAMA, "model_type": "mixtral"}, 1, 1, 0)


class Counter(TorchDispatchMode):
    """Counts operations that are no views of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num += not func.is_view and func._schema.name.split("::")[1] not in ("detach", "empty", "lift_fresh")
        return out


def operations(kind: str, layers: int) -> int:
    config = CONFIGS[kind](**SHAPE, num_hidden_layers=layers)
    runner = Runner(AutoModelForCausalLM.from_config(config).eval(), 1, 64, attention="split", fixed=True)
    ids, start = torch.tensor([[5]]), torch.tensor([10])
    with torch.inference_mode():
        runner.step(ids, start, 16)
        with Counter() as counter:
            runner.logits(runner.step(ids, start, 16)).argmax(-1)
    return counter.num


@pytest.mark.parametrize("kind", LAYER_OPS)
def test_operations_are_those_of_the_engines_step(kind: str) -> None:
    two, four = operations(kind, 2), operations(kind, 4)
    assert (four - two) / 2 == pytest.approx(LAYER_OPS[kind], rel=0.05)
    assert two - (four - two) == pytest.approx(STEP_OPS, abs=15)
