"""The engine against the plain model: greedy equality token by token, and the joint distribution of its samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import engine.accept
import engine.draft
import engine.speculate
from engine.accept import residual
from engine.draft import Drafter, LookupDrafter, ModelDrafter, SelfDrafter
from engine.model import Runner
from engine.policy import Policy
from engine.request import Answer, Request
from engine.speculate import Decoder
from engine.warp import Warp, draw

VOCAB = 64


def tiny(seed: int, vocab: int = VOCAB, layers: int = 2, positions: int = 256, spread: float = 0.5) -> PreTrainedModel:
    """A random Llama whose logits are spread enough for clear top tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=spread,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def noisy(model: PreTrainedModel, scale: float, seed: int = 9) -> PreTrainedModel:
    """The model with noise on its weights: it agrees now and then."""
    other = LlamaForCausalLM(model.config)
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return other.eval()


TARGET = tiny(0)
REFERENCE = tiny(0)
DRAFTS = {"same": tiny(0), "noise": noisy(TARGET, 0.15), "other": tiny(7, layers=1)}


def plain_greedy(ids: list[int], max_new: int, eos: set[int]) -> list[int]:
    """The reference: the untouched model, whole text again for each token."""
    out = list(ids)
    with torch.no_grad():
        for _ in range(max_new):
            out.append(int(REFERENCE(torch.tensor([out])).logits[0, -1].argmax()))
            if out[-1] in eos:
                break
    return out[len(ids) :]


def decode(requests: list[Request], drafter: Drafter | None, k: int, batch: int, eos: set[int]) -> dict[str, Answer]:
    decoder = Decoder(Runner(TARGET, batch, 200), eos, drafter, k)
    return {answer.request.id: answer for answer in decoder.run(requests)}


@given(
    draft=st.sampled_from(["none", "same", "noise", "other", "lookup", "shortlist", "short positions", "self"]),
    k=st.integers(1, 16),
    batch=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    max_new=st.integers(1, 24),
    num_eos=st.integers(0, 12),
    seed=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_greedy_equals_the_plain_model(
    draft: str, k: int, batch: int, lengths: list[int], max_new: int, num_eos: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    eos = set(torch.randperm(VOCAB, generator=generator)[:num_eos].tolist())
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    requests = [Request(str(i), tuple(ids), max_new) for i, ids in enumerate(prompts)]
    drafter: Drafter | None
    if draft == "none":
        drafter, k = None, 0
    elif draft == "lookup":
        drafter = LookupDrafter()
    elif draft == "shortlist":
        drafter = ModelDrafter(Runner(DRAFTS["noise"], batch, 200, torch.arange(3, VOCAB, 2)))
    elif draft == "short positions":  # T15: the draft's positions end before the target's
        drafter = ModelDrafter(Runner(DRAFTS["noise"], batch, 40))
    elif draft != "self":
        drafter = ModelDrafter(Runner(DRAFTS[draft], batch, 200))
    target = Runner(TARGET, batch, 200)
    if draft == "self":
        drafter = SelfDrafter(target, 1)
    answers = {answer.request.id: answer for answer in Decoder(target, eos, drafter, k).run(requests)}
    for i, ids in enumerate(prompts):
        answer = answers[str(i)]
        assert answer.tokens == plain_greedy(ids, max_new, eos), (draft, k, i)
        assert sum(c.emitted for c in answer.cycles) == len(answer.tokens) - 1
        assert answer.finish == ("eos" if answer.tokens[-1] in eos else "length")
        for cycle in answer.cycles:
            assert cycle.accepted <= cycle.proposed <= k
            assert cycle.cut or cycle.emitted == cycle.accepted + 1
        if draft == "same":
            assert all(c.accepted == c.proposed for c in answer.cycles if not c.cut)


@pytest.mark.parametrize("k", [1, 8])
def test_t36_one_token_prompt_self_draft_accepts_all(k: int) -> None:
    answer = decode([Request("a", (5,), 40)], ModelDrafter(Runner(DRAFTS["same"], 1, 200)), k, 1, set())["a"]
    assert answer.tokens == plain_greedy([5], 40, set())
    assert all(c.accepted == c.proposed for c in answer.cycles)


@pytest.mark.parametrize("max_new", [1, 3, 6])
def test_t39_length_limit_inside_a_block(max_new: int) -> None:
    answer = decode([Request("a", (5, 6, 7), max_new)], ModelDrafter(Runner(DRAFTS["same"], 1, 200)), 5, 1, set())["a"]
    assert len(answer.tokens) == max_new and answer.finish == "length"
    assert sum(c.proposed for c in answer.cycles) <= max_new - 1  # nothing is drafted that could not be used


def test_t39_zero_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="max_new is 0"):
        Request("a", (1,), 0)


def test_t35_end_of_sequence_inside_the_block() -> None:
    plain = plain_greedy([3, 9], 12, set())
    # An end token that first occurs in the middle of a block of five.
    place = next(i for i in (3, 4, 2, 7) if plain[i] not in plain[:i])
    answer = decode([Request("a", (3, 9), 12)], ModelDrafter(Runner(DRAFTS["same"], 1, 200)), 5, 1, {plain[place]})["a"]
    assert answer.tokens == plain[: place + 1] and answer.finish == "eos"
    assert answer.cycles[-1].cut


def test_prompt_that_fills_the_context_to_the_last_slot() -> None:
    ids = torch.randint(0, VOCAB, (190,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request("a", tuple(ids), 10)
    for k in (1, 4, 16):
        answers = decode([request], ModelDrafter(Runner(DRAFTS["noise"], 1, 200)), k, 1, set())
        assert answers["a"].tokens == plain_greedy(ids, 10, set())
    with pytest.raises(ValueError, match="need 201 positions"):
        decode([Request("a", tuple(ids), 11)], None, 0, 1, set())


def test_t38_rows_of_a_batch_equal_their_single_runs() -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in (3, 17, 40, 41)]
    requests = [Request(str(i), ids, 20, temperature) for i, ids in enumerate(prompts) for temperature in (0.0, 0.9)][
        ::2
    ] + [Request(f"s{i}", ids, 20, 0.9) for i, ids in enumerate(prompts)]
    together = decode(requests, ModelDrafter(Runner(DRAFTS["noise"], 8, 200)), 4, 8, set())
    for request in requests:
        alone = decode([request], ModelDrafter(Runner(DRAFTS["noise"], 1, 200)), 4, 1, set())[request.id]
        assert together[request.id].tokens == alone.tokens
        assert together[request.id].cycles == alone.cycles


def test_self_speculation_reads_less_and_refuses_what_is_not_there() -> None:
    target = Runner(TARGET, 1, 50)
    early = target.first_layers(1)
    assert early.slab is target.slab and 0 < early.weight_bytes < target.weight_bytes
    for num in (0, 2):
        with pytest.raises(ValueError, match="this decoder has 2"):
            target.first_layers(num)
    # The target still has all its layers.
    assert decode([Request("a", (5, 6), 9)], None, 0, 1, set())["a"].tokens == plain_greedy([5, 6], 9, set())


def test_k_is_bounded_and_needs_a_drafter() -> None:
    runner = Runner(TARGET, 1, 50)
    for k in (-1, 17):
        with pytest.raises(ValueError, match=f"k is {k}"):
            Decoder(runner, (), None, k)
    with pytest.raises(ValueError, match="no drafter"):
        Decoder(runner, (), None, 2)


# -- distribution -----------------------------------------------------------------------------------------------------

TARGET5, DRAFT5 = tiny(3, vocab=5, spread=0.15), tiny(4, vocab=5, spread=0.15)
PROMPT = (1, 4, 2)
SAMPLES = 6000
ROWS = 300


def exact_joint(temperature: float, top_p: float, prompt: tuple[int, ...] = PROMPT) -> Tensor:
    """Probabilities of all 125 continuations of three tokens, from the plain model."""
    sequences = torch.tensor(list(itertools.product(range(5), repeat=3)))
    text = torch.cat([torch.tensor(prompt).expand(125, -1), sequences], 1)
    plain = tiny(3, vocab=5, spread=0.15)
    with torch.no_grad():
        logits = plain(text).logits[:, len(prompt) - 1 : -1].double() / temperature
    p = torch.softmax(logits, -1)
    if top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        ordered[(ordered.cumsum(-1) - ordered) >= top_p] = 0
        p = torch.zeros_like(p).scatter(-1, index, ordered)
        p = p / p.sum(-1, keepdim=True)
    return p.gather(-1, sequences[..., None])[..., 0].prod(-1)


def engine_counts(
    k: int,
    batch: int,
    temperature: float,
    top_p: float,
    draft_warp: Warp | None,
    lookup: bool = False,
    rule: str = "token",
    policy: Callable[[], Policy] | None = None,
    prompt: tuple[int, ...] = PROMPT,
    recent: int | None = None,
    num: int = 0,
    wanted: int = 3,
) -> tuple[Tensor, list[Answer]]:
    """How often the engine gave each of the 125 continuations, one prefill for all samples."""
    capacity = len(prompt) + wanted + 12
    target, draft = Runner(TARGET5, batch, capacity), Runner(DRAFT5, batch, capacity, recent=recent)
    ids = torch.tensor(prompt)
    with torch.inference_mode():
        hidden = target.prefill(ids)[-1]
        draft.prefill(ids)
        for row in range(1, batch):
            target.slab.move_row(0, row, len(ids))
            draft.slab.move_row(0, row, len(ids))
    counts, answers = torch.zeros(125), []
    made = policy() if policy is not None else None
    for first in range(0, num or (SAMPLES if batch > 1 else SAMPLES // 4), batch):
        drafter: Drafter = LookupDrafter() if lookup else ModelDrafter(draft, 11, draft_warp)
        decoder = Decoder(target, (), drafter if k else None, k, 11, 0, top_p, rule=rule, policy=made)
        for row in range(batch):
            # Rows ask for 3 to 5 tokens, so that they leave at different times; the first three are compared.
            decoder.resume(Request(f"r{first + row}", prompt, wanted + row % 3, temperature), hidden)
        while decoder.active:
            for answer in decoder.cycle():
                a, b, c = answer.tokens[:3]
                counts[a * 25 + b * 5 + c] += 1
                answers.append(answer)
    return counts, answers


def p_value(counts: Tensor, exact: Tensor) -> float:
    """Chi-square with cells of small expectation merged."""
    expected = exact * counts.sum()
    assert counts[expected == 0].sum() == 0, "a continuation of probability zero was emitted"
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    wanted = torch.cat([expected[large], expected[~large].sum()[None]]).double()
    keep = wanted > 0
    return float(stats.chisquare(observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()).pvalue)


CASES: dict[str, dict] = {
    "baseline": {"k": 0, "batch": ROWS, "temperature": 1.0, "top_p": 1.0, "draft_warp": None},
    "chain": {"k": 2, "batch": ROWS, "temperature": 1.0, "top_p": 1.0, "draft_warp": None},
    "chain, one row": {"k": 3, "batch": 1, "temperature": 0.7, "top_p": 1.0, "draft_warp": None},
    "draft temperature": {"k": 2, "batch": ROWS, "temperature": 1.0, "top_p": 1.0, "draft_warp": Warp(0.5)},
    "draft top-p": {"k": 2, "batch": ROWS, "temperature": 1.3, "top_p": 1.0, "draft_warp": Warp(1.3, 0, 0.7)},
    "greedy draft": {"k": 2, "batch": ROWS, "temperature": 1.0, "top_p": 1.0, "draft_warp": Warp(0.0)},
    "target top-p": {"k": 2, "batch": ROWS, "temperature": 1.0, "top_p": 0.8, "draft_warp": None},
    "block": {"k": 3, "batch": ROWS, "temperature": 1.0, "top_p": 1.0, "draft_warp": None, "rule": "block"},
    "block, one row": {"k": 2, "batch": 1, "temperature": 0.8, "top_p": 1.0, "draft_warp": None, "rule": "block"},
    "block, draft top-p": {
        "k": 2,
        "batch": ROWS,
        "temperature": 1.3,
        "top_p": 0.9,
        "draft_warp": Warp(0.9, 0, 0.7),
        "rule": "block",
    },
    "block, lookup": {
        "k": 2,
        "batch": ROWS,
        "temperature": 1.0,
        "top_p": 1.0,
        "draft_warp": None,
        "lookup": True,
        "rule": "block",
    },
    "lookup": {"k": 2, "batch": ROWS, "temperature": 1.0, "top_p": 1.0, "draft_warp": None, "lookup": True},
}


@pytest.mark.parametrize("case", CASES)
def test_samples_follow_the_target_joint_distribution(case: str) -> None:
    settings_ = CASES[case]
    counts, _ = engine_counts(**settings_)
    assert p_value(counts, exact_joint(settings_["temperature"], settings_["top_p"])) > 1e-3


def test_observed_acceptance_is_the_overlap() -> None:
    """z-test of the first proposal's acceptance against sum min(p, q), conditional on the first token."""
    _, answers = engine_counts(**CASES["chain"])
    plain, draft = tiny(3, vocab=5, spread=0.15), tiny(4, vocab=5, spread=0.15)
    first = torch.tensor([a.tokens[0] for a in answers])
    text = torch.cat([torch.tensor(PROMPT).expand(5, -1), torch.arange(5)[:, None]], 1)
    with torch.no_grad():
        p, q = (torch.softmax(m(text).logits[:, -1], -1) for m in (plain, draft))
    overlap = torch.minimum(p, q).sum(-1)[first]
    hits = torch.tensor([float(a.cycles[0].accepted >= 1) for a in answers])
    z = (hits - overlap).sum() / (overlap * (1 - overlap)).sum().sqrt()
    assert abs(float(z)) < 3.5


def test_the_block_rule_needs_new_noise_in_every_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides with draws past the place where it stops; drawing them again in the next cycle is seen.

    The bias is small, so a draft is taken that is often rejected, and more samples.
    """
    case = {"k": 3, "batch": ROWS, "temperature": 1.3, "top_p": 1.0, "draft_warp": Warp(0.6), "rule": "block"}
    monkeypatch.setattr(engine.speculate.noise, "fresh", lambda request, cycle: request)
    counts, _ = engine_counts(**case, wanted=4, num=15_000)
    assert p_value(counts, exact_joint(1.3, 1.0)) < 1e-3


# Each of these is a fault that tools have had; the joint test must see it.


def wrong_no_residual(p, q, proposed, u_accept, u_final, rows=None, count=None):  # type: ignore[no-untyped-def]
    """A rejected token is replaced by a draw from p."""
    accepted, _ = engine.accept.accept_sampled(p, q, proposed, u_accept, u_final, rows, count)
    there = p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]
    return accepted, draw(there, u_final.gather(1, accepted[:, None])[:, 0])


def wrong_reused_noise(p, q, proposed, u_accept, u_final, rows=None, count=None):  # type: ignore[no-untyped-def]
    """The correction uses the uniform that rejected."""
    both = torch.cat([u_accept, u_final[:, -1:]], 1)
    return engine.accept.accept_sampled(p, q, proposed, u_accept, both, rows, count)


def wrong_drop_unlikely(p, q, proposed, u_accept, u_final, rows=None, count=None):  # type: ignore[no-untyped-def]
    """Proposals are dropped after looking at their own probability."""
    confident = q.gather(2, proposed[..., None])[..., 0] > 0.3
    count = confident.long().cumprod(1).sum(1)
    return engine.accept.accept_sampled(p, q, proposed, u_accept, u_final, rows, count)


@pytest.mark.parametrize("wrong", [wrong_no_residual, wrong_reused_noise, wrong_drop_unlikely])
def test_known_wrong_rules_fail_the_joint_test(wrong: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.speculate, "accept_sampled", wrong)
    counts, _ = engine_counts(**CASES["chain"])
    assert p_value(counts, exact_joint(1.0, 1.0)) < 1e-6


def test_argmax_drafts_scored_with_a_soft_q_fail_the_joint_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.draft, "draw", lambda probs, uniforms: probs.argmax(-1))
    counts, _ = engine_counts(**CASES["chain"])
    assert p_value(counts, exact_joint(1.0, 1.0)) < 1e-6


def test_top_p_before_temperature_fails_the_joint_test(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine.speculate.probabilities

    def wrong(
        logits: Tensor, temperature: Tensor, top_k: int = 0, top_p: float = 1.0, draws: str | None = None
    ) -> Tensor:
        cut = right(logits, torch.ones_like(temperature), top_k, top_p)
        return right(cut.log(), temperature)

    exact = exact_joint(1.6, 0.75)
    case = {**CASES["chain"], "temperature": 1.6, "top_p": 0.75}
    counts, _ = engine_counts(**case)
    assert p_value(counts, exact) > 1e-3
    monkeypatch.setattr(engine.speculate, "probabilities", wrong)
    with pytest.raises(AssertionError):
        counts, _ = engine_counts(**case)
        assert p_value(counts, exact) > 1e-6


def test_residual_of_the_module_is_what_the_rule_uses() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    assert residual(p, q).tolist() == [[0.0, 1.0]]
