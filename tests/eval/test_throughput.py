"""Throughput at a batch from rows worked by hand, and what memory would have bought the baseline."""

from __future__ import annotations

import pytest

from eval import show
from eval.cells import Settings, build_cells
from eval.records import RequestRow
from eval.throughput import equal_memory, memory_bytes, throughput
from tests.eval.rows import make_row, plain


def flow(k: int, which: int, steady_tok: int, steady_ms: float, **change: object) -> RequestRow:
    """A row of batch 4 that spent `steady_ms` on `steady_tok` tokens."""
    made = {"batch": 4, "set": which, "steady_tok": steady_tok, "steady_ms": steady_ms, **change}
    return plain(4, **made) if k == 0 else make_row([(3, 2, 3)], **made)


BASE = [flow(0, 0, 40, 400.0), flow(0, 0, 40, 400.0, request_id="r1"), flow(0, 1, 20, 100.0, request_id="r2")]
FAST = [flow(3, 0, 40, 200.0), flow(3, 0, 40, 200.0, request_id="r1"), flow(3, 1, 20, 100.0, request_id="r2")]


def test_the_steady_state_is_summed_over_sets() -> None:
    found = throughput(FAST, BASE, 500, 0)
    assert found["throughput_tok_s"] == pytest.approx(1e3 * 100 / 500)
    assert found["throughput_speedup"] == pytest.approx((100 / 500) / (100 / 900))
    assert [s["speedup"] for s in found["sets"]] == pytest.approx([2.0, 1.0])
    assert found["throughput_ci"] == pytest.approx([1.0, 2.0])  # either set alone, in the extreme


def test_only_sets_that_both_ran_are_compared() -> None:
    assert throughput(FAST[:2], BASE, 500, 0)["throughput_speedup"] == pytest.approx(2.0)
    assert throughput(FAST[:2], BASE, 500, 0)["throughput_ci"] is None
    assert throughput(FAST[:2], BASE[2:], 500, 0)["throughput_speedup"] == pytest.approx((80 / 400) / (20 / 100))


def test_the_baseline_has_a_speed_and_no_speedup() -> None:
    found = throughput(BASE, BASE, 500, 0)
    assert found["throughput_tok_s"] == pytest.approx(1e3 * 100 / 900) and found["throughput_speedup"] is None


def test_at_batch_1_the_interval_is_over_requests() -> None:
    base = [plain(5, request_id=f"r{i}", wall_ms=100.0) for i in range(4)]
    arm = [make_row([(3, 3, 4)], request_id=f"r{i}", wall_ms=40.0) for i in range(4)]
    found = throughput(arm, base, 500, 0)
    assert found["throughput_speedup"] == pytest.approx(120 / 60)
    assert found["throughput_ci"] == pytest.approx([2.0, 2.0])


def test_memory_is_weights_and_rows() -> None:
    sizes = {"": {"weights": 1000.0, "kv_per_tok": 2.0}, "d": {"weights": 100.0, "kv_per_tok": 1.0}}
    assert memory_bytes(plain(4, batch=4), [40], [10], sizes) == {"weights": 1000.0, "kv_per_row": 100.0, "total": 1400}
    arm = memory_bytes(make_row([(3, 2, 3)], batch=4), [40], [10], sizes)
    assert arm == {"weights": 1100.0, "kv_per_row": 150.0, "total": 1700.0}
    windowed = memory_bytes(make_row([(3, 2, 3)], batch=4, recent=20), [40], [10], sizes)
    assert windowed == {"weights": 1100.0, "kv_per_row": 120.0, "total": 1580.0}
    assert memory_bytes(plain(4), [40], [10], None) is None


def test_equal_memory_reads_between_measured_batches_only() -> None:
    def cell(k: int, batch: int, tok_s: float, total: float) -> dict:
        memory = {"weights": 1000.0, "kv_per_row": 100.0, "total": total}
        return {"k": k, "batch": batch, "domain": "code", "group": "short", "throughput_tok_s": tok_s} | {
            "memory_bytes": memory
        }

    arm, base = cell(2, 4, 90.0, 1700.0), [cell(0, 4, 60.0, 1400.0), cell(0, 8, 80.0, 1800.0)]
    assert equal_memory(arm, [arm, *base]) == {"rows": 7.0, "speedup": pytest.approx(90 / 75), "at_most": None}
    assert equal_memory(arm, [arm, base[0]]) == {"rows": 7.0, "speedup": None, "at_most": 90 / 60}
    assert equal_memory(base[0], base) is None
    assert equal_memory(cell(2, 4, 90.0, 1390.0), base) == {"rows": 4.0, "speedup": 1.5, "at_most": None}
    assert show.equal_memory(equal_memory(arm, [arm, *base])) == "1.20x (7.0 rows)"
    assert show.equal_memory(equal_memory(arm, [arm, base[0]])) == "≤ 1.50x (7.0 rows)"
    assert show.equal_memory(None) == "n/a"
    # Nobody fills rows that make the baseline slower.
    slow = [cell(0, 4, 60.0, 1400.0), cell(0, 8, 50.0, 1800.0)]
    assert equal_memory(arm, [arm, *slow]) == {"rows": 7.0, "speedup": pytest.approx(90 / 60), "at_most": None}
    assert equal_memory(cell(2, 8, 90.0, 2900.0), slow) == {"rows": 19.0, "speedup": None, "at_most": 90 / 60}


def test_cells_carry_it_with_a_throughput_objective() -> None:
    plan = {"memory": {"": {"weights": 1000.0, "kv_per_tok": 2.0}, "d": {"weights": 9.0, "kv_per_tok": 1.0}}}
    cells = build_cells([*BASE, *FAST], plan, Settings(objective="throughput@4", min_requests=1, bootstrap=200))
    arm = next(c for c in cells if c["k"])
    assert arm["batch"] == 4 and arm["throughput_speedup"] == pytest.approx(1.8)
    assert len(arm["sets"]) == 2 and arm["memory_bytes"]["weights"] == 1009.0
    with pytest.raises(ValueError, match="throughput@B"):
        Settings(objective="throughput@0")
