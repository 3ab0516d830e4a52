"""Clipping and clearing by the rows that have a gradient: what clipping and clearing of everything gives."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from distill.clip import clear, clip
from distill.schema import Distill
from distill.teacher import ResponseDataset
from tests.distill.test_module import make_module, run, small_draft, write_answers


@pytest.mark.parametrize("limit", [1.0, 1e6, float("inf")])
def test_norm_and_gradients_are_those_of_torch(limit: float) -> None:
    ids = torch.tensor([1, 7, 40])
    table, matrix, frozen = (torch.nn.Parameter(torch.randn(64, 8)) for _ in range(3))
    table.grad, matrix.grad = torch.zeros(64, 8), torch.randn(64, 8)
    table.grad[ids] = torch.randn(3, 8)
    others = [copy.deepcopy(p) for p in (table, matrix)]
    for other, p in zip(others, (table, matrix)):
        other.grad = p.grad.clone()
    norm = clip([table, matrix, frozen], limit, {table: ids, frozen: ids})
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(others, limit)))
    for other, p in zip(others, (table, matrix)):
        torch.testing.assert_close(p.grad, other.grad)
    clear([table, matrix, frozen], {table: ids})
    assert not table.grad.any() and not matrix.grad.any() and frozen.grad is None


@pytest.mark.parametrize("tied", [True, False])
def test_training_leaves_no_gradient_behind_and_takes_the_steps_of_whole_tables(
    tied: bool, t_tied: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ResponseDataset(write_answers(tmp_path / "answers", t_tied), 64)
    windows = [[data.collate([0, 1])], [data.collate([2]), data.collate([3])], [data.collate([4])]]
    stage, shortlist = Distill(outside_rows=64, grad_clip=0.1), torch.arange(0, 512, 4)
    ours = make_module(t_tied, stage, small_draft(tied), shortlist=shortlist)
    run(ours, windows)
    for name, value in ours.named_parameters():
        assert value.grad is None or not value.grad.any(), name
    monkeypatch.setattr("distill.module.touched_rows", lambda *_: {})
    whole = make_module(t_tied, stage, small_draft(tied), shortlist=shortlist)
    run(whole, windows)
    before = dict(small_draft(tied).named_parameters())
    for (name, one), other in zip(ours.draft.named_parameters(), whole.draft.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.equal(one, before[name]), name


def test_a_whole_head_has_its_gradient_everywhere(t_tied: PreTrainedModel, tmp_path: Path) -> None:
    data = ResponseDataset(write_answers(tmp_path / "answers", t_tied), 64)
    module = make_module(t_tied, Distill(grad_clip=0.1))
    run(module, [[data.collate([0])]])
    assert module.taken["grad_norm"] > 0
    assert not any(value.grad is not None and value.grad.any() for value in module.parameters())
