"""Simulated acceptance: as many proposals are kept as the rates say, by the same draws everywhere, and it is marked."""

from __future__ import annotations

import math

import pytest
import torch

from engine.costs import Costs, tau_by_position
from engine.draft import LookupDrafter, ModelDrafter
from engine.model import Runner
from engine.policy import Adaptive
from engine.request import Answer, Request
from engine.simulate import SimulatedDecoder
from engine.speculate import Decoder
from tests.engine.test_speculate import DRAFTS, TARGET

RATES = (0.8, 0.5, 0.9)


def answers(
    rates: tuple[float, ...], k: int = 3, batch: int = 1, num: int = 4, new: int = 60, temperature: float = 0.0
) -> list[Answer]:
    target, draft = Runner(TARGET, batch, 160), Runner(DRAFTS["noise"], batch, 160)
    requests = [Request(f"r{i}", tuple(range(3, 9 + i)), new, temperature) for i in range(num)]
    return list(SimulatedDecoder(target, ModelDrafter(draft), k, rates).run(requests))


@pytest.mark.parametrize(("rate", "kept"), [(1.0, 3), (0.0, 0)])
def test_all_and_none(rate: float, kept: int) -> None:
    for answer in answers((rate,)):
        whole = [c for c in answer.cycles if c.proposed == 3]
        assert whole and {c.accepted for c in whole} == {kept}
        assert len(answer.tokens) == 60 == 1 + sum(c.emitted for c in answer.cycles)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rates_by_position_are_kept(temperature: float) -> None:
    cycles = [c for a in answers(RATES, num=16, new=130, temperature=temperature) for c in a.cycles if c.proposed == 3]
    for j, rate in enumerate(RATES):
        reached = sum(c.accepted >= j for c in cycles)
        passed = sum(c.accepted > j for c in cycles)
        assert abs(passed / reached - rate) < 4 * math.sqrt(rate * (1 - rate) / reached)
    mean = sum(c.emitted for c in cycles) / len(cycles)
    assert mean == pytest.approx(tau_by_position(RATES), abs=0.15)


def test_a_request_accepts_alike_alone_and_in_a_batch() -> None:
    alone = {a.request.id: a.cycles for a in answers(RATES)}
    assert {a.request.id: a.cycles for a in answers(RATES, batch=3)} == alone
    assert {a.request.id: a.cycles for a in answers(RATES)} == alone
    assert {a.request.id: a.cycles for a in answers((0.3,))} != alone


def test_answers_are_marked_and_end_by_length_alone() -> None:
    assert all(a.simulated and a.finish == "length" for a in answers(RATES))
    target = Runner(TARGET, 1, 160)
    (real,) = Decoder(target, ()).run([Request("r0", tuple(range(3, 9)), 8)])
    assert not real.simulated


def test_a_policy_learns_the_given_rates() -> None:
    costs = Costs(10.0, {k: 10.0 + 0.1 * k for k in range(5)}, 1.0, context=16)
    policy = Adaptive([costs], 4)
    target, draft = Runner(TARGET, 1, 256), Runner(DRAFTS["noise"], 1, 256)
    decoder = SimulatedDecoder(target, ModelDrafter(draft), 4, (0.9,), policy=policy)
    list(decoder.run([Request("r0", tuple(range(3, 9)), 240)]))
    assert policy.acceptance("other")[0] == pytest.approx(0.9, abs=0.12)


@pytest.mark.parametrize(("rates", "told"), [((), "no acceptance given"), ((1.2,), "must lie in 0..1")])
def test_bad_rates_are_refused(rates: tuple[float, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        answers(rates)


def test_a_look_up_is_refused() -> None:
    with pytest.raises(ValueError, match="look-up proposes by the text"):
        SimulatedDecoder(Runner(TARGET, 1, 64), LookupDrafter(device=torch.device("cpu")), 2, (0.5,))  # type: ignore[arg-type]
