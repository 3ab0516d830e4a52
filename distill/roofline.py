"""What a decoding step takes on a device that is not here: bytes, products and operations over its rates. No torch.

    step = max(bytes / bandwidth, flops / peak) + operations * their cost

with bytes = weights read + KV of all rows, flops = 2 * weights read * tokens + attention. It knows nothing of kernels,
caches or clocks, so it is a bound with a correction and not a measurement. How far it is off on a device that was
measured, `eval.calibrate` tells.

Source: the roofline model, Williams et al., Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distill.counts import attention_width, count, kv_bytes
from distill.devices import Device
from engine.costs import Costs

Config = Mapping[str, Any]
Head = tuple[int | None, int | None]  # rows of a shortlist, rank of a low-rank head
WEIGHT_BYTES = 2  # bf16, as recipes serve
# Operations of a layer and of the rest of a step (embedding, rotary table, last norm, head, choice of a token), views
# left out, counted in the engine's own step on a CPU; a test counts them again.
LAYER_OPS = {"llama": 39, "qwen2": 39, "qwen3": 51, "mistral": 39, "gemma2": 63, "gemma3_text": 75}
STEP_OPS = 30
ACCEPT_OPS = 40


def step_ms(
    device: Device, config: Config, batch: int, tokens: int, context: int, head: Head = (None, None),
    eager: bool = False,
) -> float:  # fmt: skip
    """One step of a model: `tokens` new tokens in each of `batch` rows that hold `context` tokens.

    Args:
        device: peaks and shares.
        config: content of config.json.
        batch, tokens, context: the load.
        head: rows in use and rank; (None, None) is the whole head.
        eager: the host launches every operation, beside the device's work, and the longer of both is seen; else one
            captured graph does.

    Returns:
        milliseconds, predicted.

    Raises:
        ValueError: a type whose step is not described (a mixture of experts reads more experts for more tokens).
    """
    if config["model_type"] not in LAYER_OPS:
        raise ValueError(
            f"no prediction for model type {config['model_type']!r}; there is one for {', '.join(LAYER_OPS)}"
        )
    weights = count(config, *head)[1]
    moved = WEIGHT_BYTES * weights + batch * context * kv_bytes(config, WEIGHT_BYTES)
    layers = config["num_hidden_layers"]
    flops = batch * tokens * (2 * weights + 4 * layers * attention_width(config) * (context + tokens))
    busy = 1e3 * max(moved / (device.bandwidth * device.bandwidth_frac), flops / (device.flops * device.compute_frac))
    ops = layers * LAYER_OPS[config["model_type"]] + STEP_OPS
    captured = busy + ops * device.replay_ms
    return max(captured, ops * device.launch_ms) if eager else captured


def predict_costs(
    device: Device, target: Config, draft: Config, head: Head, max_k: int, context: int, batch: int,
    name: str = "", factors: tuple[float, float] = (1.0, 1.0),
) -> Costs:  # fmt: skip
    """The costs of a cycle, in the form in which `engine.bench.measure_costs` gives measured ones.

    Args:
        device: peaks and shares.
        target, draft: contents of their config.json.
        head: the draft's head; (None, None) reads every row.
        max_k: V is predicted for k = 0..max_k.
        context: tokens in each row's cache.
        batch: rows.
        name: of the draft.
        factors: on verify passes of k >= 1 and on draft steps, both against a baseline step (`eval.calibrate`).

    Returns:
        costs; `device` says that they are predicted.
    """
    verify, drafting = factors
    host = device.host_ms + ACCEPT_OPS * device.replay_ms
    passes = {k: step_ms(device, target, batch, k + 1, context) * (verify if k else 1.0) for k in range(max_k + 1)}
    one = drafting * step_ms(device, draft, batch, 1, context, head)
    # A cycle's first draft step reads two tokens a row.
    two = drafting * step_ms(device, draft, batch, 2, context, head)
    read = device.bandwidth * device.bandwidth_frac
    return Costs(
        T_ms=passes[0] + host,
        V_ms=passes,
        t_ms=one,
        d0_ms=max(0.0, two - one),
        S_ms=ACCEPT_OPS * device.replay_ms,
        H_ms=device.host_ms,
        context=context,
        batch=batch,
        device=f"{device.name} (predicted)",
        draft=name,
        t_eager_ms=drafting * step_ms(device, draft, batch, 1, context, head, eager=True),
        t_graph_ms=one,
        prefix_kv_ms={"bandwidth": 1e3 * batch * context * kv_bytes(target, WEIGHT_BYTES) / read},
    )


def serving_bytes(models: Iterable[Config], batch: int, context: int) -> float:
    """Stored weights of some models and the KV of all rows in each: what has to fit into one device."""
    return sum(WEIGHT_BYTES * count(config)[0] + batch * context * kv_bytes(config, WEIGHT_BYTES) for config in models)
