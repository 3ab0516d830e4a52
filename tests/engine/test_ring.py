"""A draft with a window: what slots hold, what is seen, greedy equality, samples, memory, rows, pauses."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.cache import kv_bytes_per_token
from engine.draft import Batch, ModelDrafter, SelfDrafter
from engine.model import Runner
from engine.request import Answer, Request
from engine.ring import SLACK, Ring, sees
from engine.speculate import Decoder
from engine.tree import Tree
from engine.tree_cycle import TreeDecoder
from engine.tree_draft import TreeDrafter
from tests.engine.test_speculate import DRAFTS, TARGET, VOCAB, engine_counts, exact_joint, p_value, plain_greedy

RECENT = 32
SLOTS = 4 + RECENT + SLACK
TREE = Tree((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 8, 10, 12))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_what_slots_hold() -> None:
    ring = Ring(2, 32, 6)
    assert ring.slot(torch.arange(11)).tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2]
    assert ring.held(torch.tensor([7, 3, 0]), torch.arange(6)).tolist() == [
        [0, 1, 6, 7, 4, 5],
        [0, 1, 2, 3, 4, 5],  # 4 and 5 were not written yet: over the newest, so that nobody sees them
        [0, 1, 2, 3, 4, 5],
    ]
    assert ring.kept(9, torch.device("cpu")).tolist() == [0, 1, 5, 6, 7, 8]


def wrong_reads(ring: Ring, steps: list[tuple[int, int]]) -> int:
    """Plays steps (how far before the newest position ever they start, tokens) on a list of slots.

    Counts keys that are seen and are not there, and queries that do not see just what they should.
    """
    there, newest, wrong = torch.full((ring.slots,), -1), -1, 0
    for back, size in steps:
        start = max(0, newest - back)
        written = torch.arange(start, start + size)
        there[ring.slot(written)] = written
        held = ring.held(written[-1:], torch.arange(ring.slots))
        seen = sees(written[:, None], held, None, ring)
        wrong += int((seen & (held != there)).sum())
        for row, x in enumerate(written.tolist()):
            want = [p for p in range(x + 1) if p < ring.sinks or p > x - ring.recent]
            wrong += sorted(held[0, seen[row]].tolist()) != want  # each once
        newest = max(newest, start + size - 1)
    return wrong


@given(
    sinks=st.integers(0, 9),
    recent=st.integers(32, 50),
    steps=st.lists(st.tuples(st.integers(-1, SLACK), st.integers(1, SLACK + 1)), max_size=25),
)
@settings(max_examples=80, deadline=None)
def test_no_visible_key_is_overwritten(sinks: int, recent: int, steps: list[tuple[int, int]]) -> None:
    """Wherever the next step starts up to 64 before the newest position, and in steps of up to 65 tokens."""
    ring = Ring.for_capacity(sinks, recent, 10_000)
    assert ring.longest_step == SLACK + 1
    assert wrong_reads(ring, [(0, 40), *steps]) == 0


def test_less_slack_is_too_little() -> None:
    steps = [(-1, 60), (-1, 60), (-1, SLACK), (SLACK, 1)]
    assert wrong_reads(Ring(4, RECENT, SLOTS), steps) == 0
    assert wrong_reads(Ring(4, RECENT, SLOTS - 1), steps) > 0


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"recent": 31}, "recent is 31.*32 tokens or more"),
        ({"recent": 0}, "recent is 0"),
        ({"recent": 64, "sinks": -1}, "sinks is -1.*0 to 256"),
        ({"recent": 64, "sinks": 257}, "sinks is 257"),
    ],
)
def test_windows_out_of_range_are_refused(given_: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Runner(TARGET, 1, 200, **given_)


def test_a_target_with_a_window_is_refused() -> None:
    target = Runner(TARGET, 1, 200, recent=RECENT)
    with pytest.raises(ValueError, match=r"recent = 32.*draft alone"):
        Decoder(target, ())
    with pytest.raises(ValueError, match=r"recent = 32.*own slab"):
        SelfDrafter(target, 1)


@pytest.mark.parametrize("fixed,slots", [(False, 2 + 40 + 64), (True, 256)])
def test_slab_bytes_equal_the_formula(fixed: bool, slots: int) -> None:
    runner = Runner(TARGET, 3, 100_000, recent=40, sinks=2, fixed=fixed)
    assert runner.slab.nbytes == 3 * slots * kv_bytes_per_token(TARGET.config, torch.float32)
    assert Runner(TARGET, 3, 50, recent=40).slab.capacity == 50


# -- what is seen -----------------------------------------------------------------------------------------------------

BASE = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXTRA: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": 50},  # the sinks are seen for a while after they left the window
    "gemma2": {"sliding_window": 17, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 17, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
}


@lru_cache
def pair(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model that the engine never touches, and its copy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**BASE, **EXTRA[kind]})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        ours = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    ours.load_state_dict(model.state_dict())
    return model, ours


def masked_logits(kind: str, text: Tensor, recent: int, sinks: int = 4) -> Tensor:
    """The plain model over a whole text [T] under an explicit mask: [T, V]."""
    model, _ = pair(kind)
    x, p = torch.arange(text.shape[0])[:, None], torch.arange(text.shape[0])
    kept = (p <= x) & ((p < sinks) | (p > x - recent))
    near = kept & (p > x - EXTRA[kind].get("sliding_window", 1 << 20))
    full, sliding = (
        torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None] for seen in (kept, near)
    )
    by_layer = {"full_attention": full, "sliding_attention": sliding}
    mask = by_layer if kind.startswith("gemma") else sliding
    with torch.inference_mode():
        return model(text[None], attention_mask=mask, use_cache=False).logits[0]


@pytest.mark.parametrize("kind", EXTRA)
@pytest.mark.parametrize("lengths,fixed", [([150], False), ([150, 33, 7], False), ([150, 33], True)])
def test_steps_under_a_window_equal_an_explicit_mask(kind: str, lengths: list[int], fixed: bool) -> None:
    """Prefill past the window, then steps, rejected tokens and more steps, far past one turn of the ring."""
    batch = len(lengths)
    runner = Runner(pair(kind)[1], batch, 1000, recent=RECENT, fixed=fixed)
    text = torch.randint(1, 97, (batch, 420), generator=torch.Generator().manual_seed(batch))
    whole = torch.stack([masked_logits(kind, row, RECENT) for row in text])
    assert (masked_logits(kind, text[0], RECENT + 1) - whole[0]).abs().max() > 1e-3  # one token more is seen
    for layer in (*runner.slab.key, *runner.slab.value):
        layer.fill_(3.0)  # what was there before must not be seen
    with torch.inference_mode():
        for row, n in enumerate(lengths):
            got = runner.logits(runner.prefill(text[row, :n], row))
            assert (got - whole[row, :n]).abs().max() < 1e-5
        start = torch.tensor(lengths)
        for size in (1, 5, 17, 1, 64, 2, 16, 1, 65, 1):
            ids = torch.stack([text[row, int(s) : int(s) + size] for row, s in enumerate(start)])
            need = int(start.max()) + size
            got = runner.logits(runner.step(ids, start, runner.extent(need, need)))
            want = torch.stack([whole[row, int(s) : int(s) + size] for row, s in enumerate(start)])
            assert (got - want).abs().max() < 1e-5, size
            start = start + size
            junk = torch.randint(1, 97, (batch, 16))
            runner.step(junk, start, runner.extent(int(start.max()) + 16, int(start.max()) + 16))
            start = start - 1  # the newest two tokens are read again
            assert int(start.max()) + 81 < 420


def test_prefill_equals_stepping_token_by_token() -> None:
    """Across two bands of queries, and in the keys that stay."""
    read, stepped = (Runner(pair("llama")[1], 1, 1000, recent=100) for _ in range(2))
    text = torch.randint(1, 97, (600,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        at_once = read.logits(read.prefill(text))
        one_by_one = [
            stepped.step(t[None, None], torch.tensor([i]), stepped.extent(i + 1, i + 1)) for i, t in enumerate(text)
        ]
    assert (at_once - stepped.logits(torch.cat(one_by_one, 1)[0])).abs().max() < 1e-5
    for mine, other in zip((*read.slab.key, *read.slab.value), (*stepped.slab.key, *stepped.slab.value), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_many_keys_under_a_window() -> None:
    """Past 2,048 keys a step on a CPU uses other kernels."""
    runner = Runner(pair("llama")[1], 16, 400, recent=RECENT)
    text = torch.randint(1, 97, (16, 160), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([150, 20, 99, 130] * 4)
    with torch.inference_mode():
        for row, n in enumerate(lengths.tolist()):
            runner.prefill(text[row, :n], row)
        ids = torch.stack([text[row, n : n + 3] for row, n in enumerate(lengths.tolist())])
        got = runner.logits(runner.step(ids, lengths, runner.extent(153, 153)))
        for row in range(4):
            n = int(lengths[row])
            assert (got[row] - masked_logits("llama", text[row, : n + 3], RECENT)[-3:]).abs().max() < 1e-5


# -- decoding ---------------------------------------------------------------------------------------------------------


class Stutter:
    """Drafts in one round of three only: the draft has to catch up again and again."""

    def __init__(self, k: int) -> None:
        self.k, self.round = k, 0

    def choose(self, requests: list[str], context: int) -> int:
        self.round += 1
        return self.k if self.round % 3 == 0 else 0

    def drafts(self, request: str, context: int) -> bool:
        return context % 2 == 0

    def observe(self, request: str, proposed: int, accepted: int) -> None:
        """Past cycles do not matter."""

    def took(self, k: int, rows: int, context: int, ms: float) -> None:
        assert k >= 0 and rows > 0 and context > 0 and ms > 0

    def forget(self, request: str) -> None:
        """Nothing is kept."""


def decode(
    requests: list[Request], draft: Runner, k: int, batch: int, eos: set[int] | None = None, capacity: int = 200,
    shape: str = "chain", rule: str = "token", fixed: bool = False,
) -> dict[str, Answer]:  # fmt: skip
    target = Runner(TARGET, batch, capacity, fixed=fixed)
    if shape == "tree":
        decoder: Decoder = TreeDecoder(target, eos or (), TreeDrafter(draft), TREE)
    else:
        policy = Stutter(k) if shape == "policy" else None
        decoder = Decoder(target, eos or (), ModelDrafter(draft), k, rule=rule, policy=policy)
    return {answer.request.id: answer for answer in decoder.run(requests)}


def prompts(lengths: list[int], seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


@given(
    draft=st.sampled_from(["same", "noise", "other", "shortlist"]),
    shape=st.sampled_from(["chain", "tree", "policy"]),
    k=st.integers(1, 16),
    batch=st.integers(1, 4),
    recent=st.integers(32, 60),
    sinks=st.integers(0, 8),
    lengths=st.lists(st.sampled_from([1, 2, 30, 97, 120, 160, 185]), min_size=1, max_size=5),
    max_new=st.integers(1, 15),
    num_eos=st.integers(0, 8),
    fixed=st.booleans(),
    seed=st.integers(0, 50),
)
@settings(max_examples=40, deadline=None)
def test_greedy_equals_the_plain_model_with_a_windowed_draft(
    draft: str, shape: str, k: int, batch: int, recent: int, sinks: int, lengths: list[int], max_new: int, num_eos: int,
    fixed: bool, seed: int,
) -> None:  # fmt: skip
    """Prompts of one token, and of 185 tokens that with 15 new ones fill the 200 positions."""
    generator = torch.Generator().manual_seed(seed)
    eos = set(torch.randperm(VOCAB, generator=generator)[:num_eos].tolist())
    rows = torch.arange(3, VOCAB, 2) if draft == "shortlist" else None
    model = DRAFTS["noise" if draft == "shortlist" else draft]
    runner = Runner(model, batch, 200, rows, recent=recent, sinks=sinks, fixed=fixed)
    requests = [Request(str(i), ids, max_new) for i, ids in enumerate(prompts(lengths, seed))]
    answers = decode(requests, runner, k, batch, eos, shape=shape, fixed=fixed)
    for request in requests:
        answer = answers[request.id]
        assert answer.tokens == plain_greedy(list(request.ids), max_new, eos)
        assert sum(c.emitted for c in answer.cycles) == len(answer.tokens) - 1
        assert all(c.cut or c.emitted == c.accepted + 1 for c in answer.cycles)


def accepted_frac(answer: Answer) -> float:
    return sum(c.accepted for c in answer.cycles) / sum(c.proposed for c in answer.cycles)


@pytest.mark.parametrize("shape", ["chain", "tree", "policy"])
def test_t40_the_target_itself_with_a_window(shape: str) -> None:
    """Its answer is the target's, although it forgets; what it accepts shows how much it forgets."""
    (ids,) = prompts([120], 5)
    request, found, plain = Request("a", ids, 40), {}, plain_greedy(list(ids), 40, set())
    for recent in (RECENT, 150, None):
        runner = Runner(DRAFTS["same"], 1, 200, recent=recent)
        found[recent] = decode([request], runner, 4, 1, shape=shape)["a"]
        assert found[recent].tokens == plain
    # 150 recent tokens and 4 sinks forget little of 160; none are forgotten without a window.
    assert accepted_frac(found[None]) == 1
    assert accepted_frac(found[RECENT]) <= accepted_frac(found[150]) <= 1
    assert 0 < accepted_frac(found[RECENT]) < 1


@pytest.mark.parametrize("shape,rule", [("chain", "token"), ("chain", "block"), ("tree", "token")])
@pytest.mark.parametrize("recent,fixed", [(None, False), (RECENT, False), (RECENT, True)])
def test_sampled_rows_of_a_ragged_batch_equal_their_single_runs(
    shape: str, rule: str, recent: int | None, fixed: bool
) -> None:
    """Tokens and cycles, although rows have less room than k, leave, move and make room for others."""
    wanted = (13, 30, 2, 21, 5, 40)
    requests = [
        Request(str(i), ids, wanted[i], (0.9, 0.0, 0.7)[i % 3])
        for i, ids in enumerate(prompts([3, 150, 40, 101, 1, 33]))
    ]

    def run(some: list[Request], batch: int) -> dict[str, Answer]:
        runner = Runner(DRAFTS["noise"], batch, 300, recent=recent, fixed=fixed)
        return decode(some, runner, 5, batch, {7}, 300, shape, rule, fixed)

    together = run(requests, 4)
    for request in requests:
        alone = run([request], 1)[request.id]
        assert together[request.id].tokens == alone.tokens
        assert together[request.id].cycles == alone.cycles


@pytest.mark.parametrize("recent", [None, RECENT])
@pytest.mark.parametrize("skipped", [1, 9, 130])
def test_catching_up_equals_having_read(recent: int | None, skipped: int) -> None:
    """Rows that were there through a pause, one that came in the middle of it, and one of two tokens."""
    texts = [list(ids) for ids in prompts([190, 170, 160, 3])]
    runners = [Runner(DRAFTS["noise"], 4, 200, recent=recent) for _ in range(2)]
    paused, fresh = (ModelDrafter(runner) for runner in runners)
    late = skipped // 2
    with torch.inference_mode():
        for row, text in enumerate(texts):
            came = late if row in (1, 3) else 0
            if came == 0:
                paused.start(row, torch.tensor(text[: max(1, len(text) - 1 - skipped)]))
                paused.join(row)
        for done in range(skipped):
            if done == late:
                for row in (1, 3):
                    paused.start(row, torch.tensor(texts[row][: max(1, len(texts[row]) - 1 - (skipped - late))]))
                    paused.join(row)
            paused.skip()
        for row, text in enumerate(texts):
            fresh.start(row, torch.tensor(text))
        length = torch.tensor([len(t) for t in texts])
        last = torch.tensor([t[-2:] for t in texts])
        batch = Batch(last, length, 190, torch.ones(4), torch.arange(4), texts, "sampled")
        got, want = (drafter.propose(batch, 6) for drafter in (paused, fresh))
    assert torch.equal(got.tokens, want.tokens)
    assert got.q is not None and want.q is not None and torch.allclose(got.q, want.q, atol=1e-5)


LONG = tuple(torch.randint(0, 5, (120,), generator=torch.Generator().manual_seed(2)).tolist())


@pytest.mark.parametrize("batch,num", [(1, 600), (4, 1200)])
def test_samples_follow_the_target_with_a_windowed_draft(batch: int, num: int) -> None:
    counts, answers = engine_counts(
        3, batch, 1.0, 0.9, None, rule="block" if batch == 1 else "token", prompt=LONG, recent=RECENT, num=num
    )
    assert p_value(counts, exact_joint(1.0, 0.9, LONG)) > 1e-3
    assert any(c.accepted < c.proposed for a in answers for c in a.cycles)
    assert any(c.accepted == c.proposed > 0 for a in answers for c in a.cycles)
