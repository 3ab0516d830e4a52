"""What is said of a draft before anything is measured."""

from __future__ import annotations

from eval.inventory import teacher_forced


def test_teacher_forced_acceptance_is_taken_from_validation_by_domain() -> None:
    metrics = {
        "step": 9, "val/speedup": 1.2, "val/code/alpha": 0.5, "val/code/overlap": 0.4, "val/code/tau_2": 1.7,
        "val/qa/alpha": 0.2,
    }  # fmt: skip
    found = teacher_forced(metrics)
    assert found == {"code": {"argmax_match": 0.5, "sum_min_pq": 0.4}, "qa": {"argmax_match": 0.2}}
    assert teacher_forced({}) == {}
