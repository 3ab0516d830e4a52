"""The hardware check's parts without a GPU: sizes, budget, failures as rows, and what is worth a look."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.bench import attention_ms, times_ms
from engine.hardware import (
    PAIRS,
    SHORTLISTS,
    Part,
    Shape,
    attention_table,
    pair_costs,
    problems,
    random_model,
    run_parts,
    shallow,
)
from tests.conftest import make_config

CPU = torch.device("cpu")


def num_params(shape: Shape) -> int:
    """Stored parameters, norms left out."""
    width = shape.hidden // shape.heads
    layer = 2 * shape.hidden * (shape.hidden + shape.kv_heads * width) + 3 * shape.hidden * shape.ffn
    return shape.layers * layer + shape.vocab * shape.hidden * (1 if shape.tied else 2)


@pytest.mark.parametrize("name,billions", [("135M", 0.135), ("1B", 1.24), ("8B", 8.03), ("32B", 32.8)])
def test_pairs_have_the_sizes_they_are_named_for(name: str, billions: float) -> None:
    target, draft = PAIRS[name]
    assert num_params(target) / 1e9 == pytest.approx(billions, rel=0.01)
    head = SHORTLISTS.get(name, draft.vocab)
    read = num_params(draft) - (draft.vocab - head) * draft.hidden
    assert 0.05 < read / num_params(target) < 0.10


def test_the_parameter_count_is_the_models() -> None:
    for shape in PAIRS["tiny"]:
        model = random_model(shape.config(), CPU, torch.float32)
        matrices = sum(w.numel() for w in model.parameters() if w.dim() == 2)
        assert matrices == num_params(shape)
    assert shallow(make_config()).num_hidden_layers == 3


def test_parts_keep_to_the_budget_and_failures_are_rows() -> None:
    now, saved = [0.0], []

    def spend(seconds: float, result: Any = None) -> Any:
        now[0] += seconds
        return result

    def fail() -> None:
        raise RuntimeError("out of memory")

    parts = [
        Part("first", 10, lambda: spend(4, {"x": 1})),
        Part("absent", 1, lambda: spend(99), "no CUDA device"),
        Part("broken", 1, fail),
        Part("too long", 7, lambda: spend(99)),
        Part("last", 6, lambda: spend(6, [{"k": 1, "equal": True}])),
    ]
    rows = run_parts(parts, 10, lambda so_far: saved.append(len(so_far)), lambda: now[0])
    assert [row["status"] for row in rows.values()] == ["done", "skipped", "failed", "skipped", "done"]
    assert now[0] == 10 and saved == [1, 2, 3, 4, 5]
    assert rows["too long"]["reason"] == "needs up to 7 s; 6 s are left" and rows["first"]["seconds"] == 4
    assert problems(rows) == ["broken: RuntimeError('out of memory')"]


def test_what_a_person_must_look_at() -> None:
    rows = {
        "exact": {"status": "done", "result": [{"k": 4, "batch": 2, "equal": False}, {"k": 1, "equal": True}]},
        "bf16": {"status": "done", "result": [{"drafter": "self", "k": 4, "bugs": 2}, {"k": 1, "bugs": 0}]},
        "copy": {"status": "done", "result": {"bytes_per_s": 1.0}},
    }
    assert problems(rows) == [
        "exact: captured and eager tokens differ (k 4, batch 2)",
        "bf16: 2 divergences beyond the logit noise (drafter self, k 4)",
    ]


def test_attention_is_measured_beside_its_floor() -> None:
    rows = attention_table(CPU, torch.float32, ("sdpa", "split"), (4, 2, 16), (1, 2), (200,), (1, 3), 1e10)
    assert [(r["kernel"], r["batch"], r["tokens"]) for r in rows[:3]] == [
        ("sdpa", 1, 1),
        ("split", 1, 1),
        ("sdpa", 1, 3),
    ]
    assert all(r["ms"] > 0 and r["floor_frac"] == pytest.approx(r["floor_ms"] / r["ms"]) for r in rows)
    assert rows[0]["floor_ms"] == pytest.approx(2 * 2 * 16 * 4 * 200 / 1e10 * 1e3)
    assert attention_ms("split", CPU, torch.bfloat16, 1, (4, 2, 16), 2, 300, 2, 3) > 0


def test_costs_of_a_pair_are_json_and_eager_on_a_cpu() -> None:
    target, draft = (random_model(shape.config(), CPU, torch.float32) for shape in PAIRS["tiny"])
    (row,) = pair_costs(target, draft, (1, 2), (32,), 2, 2, "tiny", torch.arange(64))
    assert row["t_graph_ms"] is None and row["t_eager_ms"] == row["t_ms"] and row["attention"] == "sdpa"
    assert set(row["V_ms"]) == {"0", "1", "2"}


def test_every_call_is_timed() -> None:
    calls = []
    assert len(times_ms(lambda: calls.append(1), CPU, 4, 2)) == 4
    assert len(calls) == 6
