"""The head in its three forms, against plain products."""

from __future__ import annotations

import pytest
import torch

from engine.head import Head
from engine.model import Runner
from tests.conftest import make_config, make_target


def test_factors_are_read_in_place_of_the_product() -> None:
    model = make_target(make_config(tied=False))
    left, right = torch.randn(512, 8), torch.randn(8, 64)
    with torch.no_grad():
        model.lm_head.weight.copy_(left @ right)
    hidden = torch.randn(2, 3, 64)
    whole, split = Head(model), Head(model, factors=(left, right))
    torch.testing.assert_close(split(hidden), whole(hidden), rtol=1e-4, atol=1e-4)
    assert (whole.numel, split.numel) == (512 * 64, 8 * (512 + 64))
    cut = Head(model, vocab=500, factors=(left, right))
    torch.testing.assert_close(cut(hidden), whole(hidden)[..., :500], rtol=1e-4, atol=1e-4)


def test_a_runner_with_factors_reads_fewer_bytes_and_agrees() -> None:
    model = make_target(make_config(tied=False))
    left, right = torch.randn(512, 8), torch.randn(8, 64)
    with torch.no_grad():
        model.lm_head.weight.copy_(left @ right)
    plain, runner = Runner(model, 1, 16), Runner(model, 1, 16, factors=(left, right))
    assert plain.weight_bytes - runner.weight_bytes == 4 * (512 * 64 - 8 * (512 + 64))
    hidden = plain.prefill(torch.tensor([5, 6, 7]))
    with torch.inference_mode():
        torch.testing.assert_close(runner.logits(hidden), plain.logits(hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shapes", [((500, 8), (8, 64)), ((512, 8), (9, 64)), ((512, 8), (8, 32))])
def test_factors_of_another_head_are_refused(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="do not make the head"):
        Head(make_target(make_config(tied=False)), factors=(torch.zeros(shapes[0]), torch.zeros(shapes[1])))
    with pytest.raises(ValueError, match="shortlist"):
        Head(
            make_target(make_config(tied=False)),
            torch.arange(4),
            factors=(torch.zeros(512, 8), torch.zeros(8, 64)),
        )
