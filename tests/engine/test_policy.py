"""Draft-length policies: what they choose, that they learn, and that none of them changes what is sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from engine.cycle import Costs, cycle_ms, tau
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.policy import Adaptive, Policy, Schedule
from engine.request import Request
from engine.speculate import Decoder
from tests.engine.test_speculate import (
    DRAFTS,
    TARGET,
    VOCAB,
    engine_counts,
    exact_joint,
    p_value,
    plain_greedy,
)

COSTS = Costs(10.0, {k: 10.0 + 0.2 * k for k in range(9)}, 1.0, 0.3, 0.2, 0.1, 256)
DEAR = Costs(10.0, {k: 10.0 + 0.2 * k for k in range(9)}, 6.0, 0.3, 0.2, 0.1, 256)


class Erratic:
    """Any k in any cycle, none at all included: the decoder must stay exact under it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, requests: Sequence[str], context: int) -> int:
        return self.random.choice([0, 0, 1, 2, 5, 8])

    def drafts(self, request: str, context: int) -> bool:
        return self.random.random() < 0.5

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed <= 8

    def took(self, k: int, rows: int, context: int, ms: float) -> None:
        assert 0 <= k <= 8 and rows > 0 and context > 0 and ms > 0

    def forget(self, request: str) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("draft", ["same", "noise"])
@pytest.mark.parametrize("policy", ["erratic", "adaptive", "schedule"])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_does_not_depend_on_the_policy(draft: str, policy: str, batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (1, 9, 30, 4, 17)]
    chosen: Policy = {
        "erratic": Erratic(1),
        "adaptive": Adaptive([COSTS], 8),
        "schedule": Schedule({("", 20, 3): 4, ("", 40, 3): 1}),
    }[policy]
    drafter = ModelDrafter(Runner(DRAFTS[draft], batch, 200))
    decoder = Decoder(Runner(TARGET, batch, 200), (), drafter, 8, policy=chosen)
    requests = [Request(str(i), tuple(ids), 25) for i, ids in enumerate(prompts)]
    for answer in decoder.run(requests):
        assert answer.tokens == plain_greedy(prompts[int(answer.request.id)], 25, set())
        if draft == "same":  # after a pause the draft has caught up with what it did not see
            assert all(c.accepted == c.proposed for c in answer.cycles)


def test_a_long_pause_reads_everything_again() -> None:
    class Late(Erratic):
        def choose(self, requests: Sequence[str], context: int) -> int:
            return 4 if context > 30 else 0

    decoder = Decoder(Runner(TARGET, 1, 200), (), ModelDrafter(Runner(DRAFTS["same"], 1, 200)), 8, policy=Late(0))
    answer = next(iter(decoder.run([Request("a", (5, 6), 50)])))
    assert answer.tokens == plain_greedy([5, 6], 50, set())
    assert sum(c.proposed for c in answer.cycles) > 10 and all(c.accepted == c.proposed for c in answer.cycles)


def test_adaptive_policy_keeps_the_joint_distribution() -> None:
    counts, answers = engine_counts(3, 1, 1.0, 1.0, None, policy=lambda: Adaptive([COSTS], 3, memory=2, strength=0.5))
    assert len({c.proposed for a in answers for c in a.cycles}) > 1
    assert p_value(counts, exact_joint(1.0, 1.0)) > 1e-3


def simulate(policy: Adaptive, accept: float, cycles: int, seed: int = 0, request: str = "a") -> list[int]:
    """Chosen k of each cycle against a draft with this acceptance."""
    rng, chosen = random.Random(seed), []
    for _ in range(cycles):
        k = policy.choose([request], 256)
        chosen.append(k)
        kept = 0
        while kept < k and rng.random() < accept:
            kept += 1
        policy.observe(request, k, kept)
    return chosen


@pytest.mark.parametrize("accept", [0.2, 0.5, 0.8, 0.95])
def test_adaptive_finds_about_the_best_fixed_k(accept: float) -> None:
    def rate(k: int) -> float:
        return tau(accept, k) / cycle_ms(COSTS, k) if k else 1 / COSTS.T_ms

    chosen = simulate(Adaptive([COSTS], 8), accept, 600)[100:]
    mean = sum(map(rate, chosen)) / len(chosen)
    assert mean > 0.97 * max(rate(k) for k in range(9))


def test_adaptive_switches_off_and_probes_more_and_more_seldom() -> None:
    policy = Adaptive([DEAR], 8)
    chosen = simulate(policy, 0.1, 400)
    assert sum(k > 0 for k in chosen[200:]) < 12
    # And on again: the draft has become good.
    assert sum(k > 0 for k in simulate(policy, 0.98, 800)[600:]) > 190


def test_adaptive_tells_requests_apart() -> None:
    policy = Adaptive([COSTS], 8)
    for i in range(80):
        simulate(policy, 0.95, 1, i, "easy")
        simulate(policy, 0.05, 1, i, "hard")
    assert policy.acceptance("easy")[0] > 0.75 and policy.acceptance("hard")[0] < 0.35
    assert policy.choose(["easy"], 256) > policy.choose(["hard"], 256)
    policy.forget("easy")
    assert policy.acceptance("easy") == policy.acceptance("new")


def test_adaptive_tells_kinds_apart_before_it_knows_a_request() -> None:
    kinds = {"code-0": "code", "qa-0": "qa", "code-1": "code", "qa-1": "qa"}
    policy = Adaptive([DEAR], 8, kinds=kinds)
    for i in range(200):
        simulate(policy, 0.98, 1, i, "code-0")
        simulate(policy, 0.05, 1, i, "qa-0")
    assert policy.choose(["code-1"], 256) > 0 and policy.choose(["qa-1"], 256) == 0
    one = Adaptive([DEAR], 8)
    for i in range(200):
        simulate(one, 0.98, 1, i, "code-0")
        simulate(one, 0.05, 1, i, "qa-0")
    assert one.acceptance("code-1") == one.acceptance("qa-1")
    # A kind rests and probes by itself.
    chosen = [(policy.choose(["qa-1"], 256), policy.choose(["code-1"], 256)) for _ in range(200)]
    assert sum(qa > 0 for qa, _ in chosen) < 8 and all(code > 0 for _, code in chosen)


def test_adaptive_knows_the_places_of_a_block() -> None:
    policy = Adaptive([COSTS], 4)
    for _ in range(300):  # the first token is a coin, what follows a right one is right
        policy.observe("a", 4, 4)
        policy.observe("a", 4, 0)
    first, *later = policy.acceptance("a")
    assert first == pytest.approx(0.5, abs=0.05) and min(later) > 0.95
    assert policy.choose(["a"], 256) == 4


def test_adaptive_goes_on_within_the_margin_and_not_beyond() -> None:
    even = Costs(10.0, {1: 10.0}, 2.0)  # pays from acceptance 0.2 on
    seen = {a: Adaptive([even], 1, margin=0.04, strength=1.0) for a in (0.17, 0.12)}
    for accept, policy in seen.items():
        for i in range(2000):
            policy.observe("a", 1, int(i * accept) < int((i + 1) * accept))
        policy.forget("a")
    # The first may be the probe that follows an accepted one.
    assert [[policy.choose(["a"], 0) for _ in range(2)][1] for policy in seen.values()] == [1, 0]


def test_the_nearest_context_counts() -> None:
    far = Costs(10.0, {k: 10.0 + 12.0 * k for k in range(9)}, 1.0, context=4000)
    policy = Adaptive([COSTS, far], 8)
    assert policy.choose(["a"], 300) > 1 and policy.choose(["a"], 3000) <= 1


def test_times_of_cycles_correct_the_costs_from_the_next_request_on() -> None:
    policy = Adaptive([COSTS], 2, prior=0.5)
    one, two = cycle_ms(COSTS, 1), cycle_ms(COSTS, 2)
    assert policy.choose(["a"], 100) == 2
    for _ in range(50):
        policy.took(1, 1, 100, one)
        policy.took(2, 1, 100, two * 1.5)  # the second proposal costs more than it was measured to
        policy.took(0, 1, 100, 10.0)
    assert policy.choose(["a"], 100) == 2  # not within the request
    policy.forget("a")
    assert policy.choose(["b"], 100) == 1
    assert policy.expected_ms(0, 100) == pytest.approx(10.0, rel=0.05)
    assert policy.expected_ms(2, 100) == pytest.approx(1.5 * two, rel=0.05)
    again = Adaptive([COSTS], 2, prior=0.5)
    again.restore(policy.state())
    assert again.choose(["b"], 100) == 1


def test_a_k_that_was_never_timed_is_off_as_far_as_the_others() -> None:
    policy = Adaptive([COSTS], 3)
    for _ in range(400):
        policy.took(1, 1, 100, 1.3 * cycle_ms(COSTS, 1))
    policy.forget("a")
    assert policy.expected_ms(0, 100) == pytest.approx(13.0, rel=0.02)
    assert policy.expected_ms(3, 100) == pytest.approx(1.3 * cycle_ms(COSTS, 3), rel=0.02)


class Reluctant(Erratic):
    """Drafts nothing for so many cycles, and says so."""

    def __init__(self, cycles: int) -> None:
        super().__init__(0)
        self.left = cycles

    def choose(self, requests: Sequence[str], context: int) -> int:
        self.left -= 1
        return 4 if self.left < 0 else 0

    def drafts(self, request: str, context: int) -> bool:
        return self.left <= 0


class Reading(Runner):
    """Writes down each prompt that it reads."""

    read: list[list[int]]

    def prefill(self, ids: torch.Tensor, row: int = 0) -> torch.Tensor:
        self.read.append(ids.tolist())
        return super().prefill(ids, row)


@pytest.mark.parametrize("recent", [None, 32])
@pytest.mark.parametrize("cycles", [0, 1, 7, 1000])
def test_a_draft_reads_a_prompt_when_it_first_proposes(cycles: int, recent: int | None) -> None:
    ids = list(range(3, 40))
    draft = Reading(DRAFTS["same"], 1, 120, recent=recent)
    draft.read = []
    decoder = Decoder(Runner(TARGET, 1, 120), (), ModelDrafter(draft), 4, policy=Reluctant(cycles))
    answer = next(iter(decoder.run([Request("a", tuple(ids), 30)])))
    assert answer.tokens == plain_greedy(ids, 30, set())
    text = [*ids, *answer.tokens]
    assert draft.read == ([] if cycles == 1000 else [text[: len(ids) + cycles]])
    if recent is None:  # the target itself, so whatever it read it read rightly
        assert all(c.accepted == c.proposed for c in answer.cycles)


def test_rows_that_were_not_read_move_and_leave() -> None:
    """Ragged requests in three rows, each read or not by chance; the draft is the target, so all must be accepted."""
    generator = torch.Generator().manual_seed(5)
    lengths = [(n, new) for n in (1, 30, 9, 4, 17) for new in (3, 25, 8)]
    requests = [
        Request(f"{n}-{new}", tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()), new)
        for n, new in lengths
    ]
    decoder = Decoder(Runner(TARGET, 3, 200), (), ModelDrafter(Runner(DRAFTS["same"], 3, 200)), 8, policy=Erratic(2))
    for answer in decoder.run(requests):
        assert answer.tokens == plain_greedy(list(answer.request.ids), answer.request.max_new, set())
        assert all(c.accepted == c.proposed or c.cut for c in answer.cycles)


def test_adaptive_and_schedule_say_whether_they_would_draft() -> None:
    policy = Adaptive([COSTS], 4, prior=0.9)
    assert policy.drafts("a", 100)
    for _ in range(200):
        policy.observe("a", 4, 0)
    before = policy.state()
    assert not policy.drafts("a", 100) and policy.state() == before
    table = Schedule({("", 50, 1): 3})
    assert table.drafts("a", 50) and not table.drafts("a", 51)


def test_a_slow_spell_is_forgotten() -> None:
    """k = 2 was timed while the machine was slow, and is chosen again when others show that it no longer is."""
    policy = Adaptive([COSTS], 2, prior=0.5)
    for _ in range(40):
        policy.took(2, 1, 100, 1.6 * cycle_ms(COSTS, 2))
        policy.took(1, 1, 100, cycle_ms(COSTS, 1))
    policy.forget("a")
    assert policy.choose(["b"], 100) == 1
    for _ in range(300):
        policy.took(1, 1, 100, cycle_ms(COSTS, 1))
    policy.forget("b")
    assert policy.choose(["c"], 100) == 2


def test_times_count_when_no_request_is_under_way_and_only_of_full_batches() -> None:
    policy = Adaptive([COSTS], 2)
    policy.choose(["a", "b"], 100)
    policy.took(0, 1, 100, 20.0)
    policy.took(0, 3, 100, 50.0)  # other rows than the costs are of
    policy.forget("a")
    assert policy.expected_ms(0, 100) == 10.0
    policy.forget("b")
    assert policy.expected_ms(0, 100) > 11.0 and policy._times[0][1] == 1.0
    policy.choose(["c", "d"], 100)
    for _ in range(256):  # a stream that never ends
        policy.took(0, 1, 100, 10.0)
    policy.forget("c")
    assert policy.expected_ms(0, 100) == pytest.approx(10.0, rel=0.02)


def test_odd_cycles_count_little_and_the_one_after_a_pause_not_at_all() -> None:
    policy = Adaptive([COSTS], 2)
    policy.took(1, 1, 100, 1.0)  # after a pause: there was no cycle before it
    policy.forget("a")
    assert policy.expected_ms(1, 100) == cycle_ms(COSTS, 1)
    policy.took(1, 1, 100, 1e6)  # a graph was captured
    policy.forget("a")
    assert policy.expected_ms(1, 100) == pytest.approx(cycle_ms(COSTS, 1) * (4 * 6 / 5 + 2) / 5)


@pytest.mark.parametrize("off", [0.85, 1.0, 1.15])
def test_wrong_costs_do_not_mislead_for_long(off: float) -> None:
    """Tokens a millisecond against the best fixed k, where drafting is told to be dearer or cheaper than it is."""
    true = Costs(10.0, {k: 11.0 + 0.3 * k for k in range(1, 5)} | {0: 10.0}, 1.0, 0.0, 0.0, 0.0, 256)
    told = Costs(10.0, {k: v * (off if k else 1) for k, v in true.V_ms.items()}, off, 0.0, 0.0, 0.0, 256)
    rng = random.Random(3)
    answers = {f"{i}": [rng.random() < (0.75 if i % 2 else 0.12) for _ in range(80)] for i in range(40)}

    def spent(policy: Adaptive | int) -> float:
        total = 0.0
        for name, right in answers.items():
            at = 1
            while at < len(right):
                k = policy if isinstance(policy, int) else policy.choose([name], 256)
                kept = next((j for j, ok in enumerate(right[at : at + k]) if not ok), min(k, len(right) - at))
                ms = cycle_ms(true, k) if k else true.T_ms
                total += ms
                if not isinstance(policy, int):
                    policy.observe(name, k, kept)
                    policy.took(k, 1, 256, ms * rng.uniform(0.9, 1.1))
                at += kept + 1
            if not isinstance(policy, int):
                policy.forget(name)
        return total

    best = min(spent(k) for k in range(5))
    kinds = {name: "odd" if int(name) % 2 else "even" for name in answers}
    assert spent(Adaptive([told], 4, kinds=kinds)) < 0.98 * best


def test_bad_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="largest measured k"):
        Adaptive([COSTS], 9)
    with pytest.raises(ValueError, match="largest measured k"):
        Adaptive([], 1)
    with pytest.raises(ValueError, match="0 to 16"):
        Schedule({("", 10, 1): 17})
    assert Schedule({("", 10, 1): 3, ("", 100, 4): 1}).choose(["a", "b"], 50) == 1
    assert Schedule({("", 10, 1): 3}).choose(["a"], 11) == 0


def test_a_schedule_tells_kinds_apart() -> None:
    table = {("code", 100, 4): 4, ("qa", 100, 4): 0, ("", 100, 4): 1}
    policy = Schedule(table, {"a": "code", "b": "code", "c": "qa"})
    assert [policy.choose(rows, 50) for rows in (["a"], ["a", "b"], ["c"], ["a", "c"], ["d"])] == [4, 4, 0, 1, 1]
    assert policy.choose(["a"], 101) == 0
