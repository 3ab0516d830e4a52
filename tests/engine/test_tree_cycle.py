"""Decoding with trees against the plain model: what each node sees, greedy equality, and the accepted path's keys."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine import noise
from engine.attention import Nodes
from engine.cache import Slab
from engine.clock import WallClock
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Answer, Request
from engine.speculate import Decoder
from engine.tree import Tree
from engine.tree_choice import accept_by_rank
from engine.tree_cycle import TreeDecoder
from engine.tree_draft import TreeDrafter
from engine.tree_tensors import tree_tensors
from engine.warp import Warp

VOCAB = 64
FIVE = Tree((-1, 0, 0, 1, 1, 2))
# Depth 6; the most likely path does not lie in consecutive slots, and the last levels are one node wide.
TREE = Tree((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 8, 10, 12))
TREES = [FIVE, TREE, Tree.chain(3), Tree((-1, *[0] * 5)), Tree((-1, 0, 0, 1, 2, 2, 5, 5, 7, 8))]
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,  # a tied random Gemma repeats its newest token
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXTRA: dict[str, dict] = {
    "llama": {},
    # Windows shorter than the tree is deep: a node must not see the first ones of its own path.
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
}


@lru_cache
def plain(kind: str, positions: int = 128) -> PreTrainedModel:
    """A random model that the engine never touches."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**BASE, **EXTRA[kind], "max_position_embeddings": positions})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def build(kind: str, scale: float = 0.0, positions: int = 128) -> PreTrainedModel:
    """The same model for the engine, with noise of `scale` on its matrices for a draft that agrees now and then."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(plain(kind, positions).config)).eval()
    model.load_state_dict(plain(kind, positions).state_dict())
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


TARGETS = {kind: build(kind) for kind in EXTRA}
DRAFTS = {kind: {"same": build(kind), "noise": build(kind, 0.08), "other": build(kind, 2.0)} for kind in EXTRA}


def plain_greedy(kind: str, ids: tuple[int, ...], max_new: int) -> list[int]:
    """The whole text again for each token."""
    out = list(ids)
    with torch.no_grad():
        for _ in range(max_new):
            out.append(int(plain(kind)(torch.tensor([out]), use_cache=False).logits[0, -1].argmax()))
    return out[len(ids) :]


def is_greedy(kind: str, answer: Answer, positions: int = 128) -> bool:
    """Is every token the plain model's argmax after those before it? One pass says as much as a decode of its own."""
    ids, tokens = answer.request.ids, answer.tokens
    with torch.no_grad():
        logits = plain(kind, positions)(torch.tensor([[*ids, *tokens[:-1]]]), use_cache=False).logits[0]
    return logits[len(ids) - 1 :].argmax(-1).tolist() == tokens


def prompts(lengths: list[int], seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


def decode(
    requests: list[Request],
    kind: str,
    draft: str,
    tree: Tree,
    batch: int,
    eos: set[int] | None = None,
    slots: int = 100,
) -> dict[str, Answer]:
    drafter = TreeDrafter(Runner(DRAFTS[kind][draft], batch, slots))
    decoder = TreeDecoder(Runner(TARGETS[kind], batch, slots), eos or (), drafter, tree)
    return {answer.request.id: answer for answer in decoder.run(requests)}


# -- what nodes see


@pytest.mark.parametrize("kind", EXTRA)
@pytest.mark.parametrize("lengths", [[13], [13, 4]])
@pytest.mark.parametrize("steps", ["one pass", "level by level"])
def test_each_node_sees_the_prefix_and_its_own_path(kind: str, lengths: list[int], steps: str) -> None:
    """Logits after every node equal the plain model's over prefix + path; then a path is kept and text goes on."""
    batch, tree = len(lengths), TREE
    runner = Runner(TARGETS[kind], batch, 64)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCAB, (batch, 20), generator=generator)
    tokens = torch.randint(0, VOCAB, (batch, tree.proposals + 1), generator=generator)
    table, root = tree_tensors(tree, torch.device("cpu")), torch.tensor(lengths)
    with torch.inference_mode():
        for row, n in enumerate(lengths):
            runner.prefill(text[row, :n], row)
        spans = [tree.level(d) for d in range(tree.max_depth + 1)] if steps == "level by level" else [range(14)]
        got = []
        for span in spans:
            nodes = Nodes(root, table.depth, table.ancestors, span.start, span.stop)
            ids = tokens[:, span.start : span.stop]
            got.append(runner.logits(runner.step_nodes(ids, nodes, max(lengths) + span.stop)))
        logits = torch.cat(got, 1)
        for row, n in enumerate(lengths):
            for node, on in enumerate(tree.ancestors):
                path = tokens[row, torch.tensor(on)]
                want = plain(kind)(torch.cat([text[row, :n], path])[None]).logits[0, -1]
                assert torch.allclose(logits[row, node], want, atol=2e-4), (row, node)
        # Row 0 keeps 0-2-6-9, row 1 keeps 0-1: their keys move together and the next step is an ordinary one.
        path = torch.tensor([[2, 6, 9, 9], [1, 1, 1, 1]])[:batch]
        kept = torch.tensor([3, 1])[:batch]
        runner.slab.gather_path(root, path, kept)
        more = torch.randint(0, VOCAB, (batch, 3), generator=generator)
        start = root + 1 + kept
        after = runner.logits(runner.step(more, start, int(start.max()) + 3))
        for row, n in enumerate(lengths):
            line = tokens[row, torch.tensor([0, *path[row, : kept[row]].tolist()])]
            want = plain(kind)(torch.cat([text[row, :n], line, more[row]])[None]).logits[0, -3:]
            assert torch.allclose(after[row], want, atol=2e-4), row


def test_only_accepted_entries_move() -> None:
    slab = Slab(2, 3, 1, 20, 1, torch.float32)
    for layer in range(2):
        slab.key[layer][:] = torch.arange(20.0)[:, None] + 100 * layer
        slab.value[layer][:] = -torch.arange(20.0)[:, None]
    root = torch.tensor([4, 0, 9])
    slab.gather_path(root, torch.tensor([[2, 5, 6], [3, 3, 3], [1, 2, 8]]), torch.tensor([3, 0, 2]))
    want = torch.arange(20.0)
    moved = want.clone()
    moved[5], moved[6], moved[7] = 6.0, 9.0, 10.0
    for layer in range(2):
        assert torch.equal(slab.key[layer][0, 0, :, 0], moved + 100 * layer)
        assert torch.equal(slab.value[layer][0, 0, :, 0], -moved)
        for row in (1, 2):
            assert torch.equal(slab.key[layer][row, 0, :, 0], want + 100 * layer)


# -- greedy equality


@given(
    kind=st.sampled_from(["llama", "gemma3_text"]),
    draft=st.sampled_from(["same", "noise", "noise", "other"]),
    tree=st.sampled_from(TREES),
    batch=st.sampled_from([1, 3]),
    max_new=st.integers(1, 20),
    num_eos=st.sampled_from([0, 0, 4, 10]),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_greedy_equals_the_plain_model(
    kind: str, draft: str, tree: Tree, batch: int, max_new: int, num_eos: int, seed: int
) -> None:
    eos = set(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:num_eos].tolist())
    texts = prompts([1 + 3 * seed, 17, 2, 30][: batch + 1], seed)
    answers = decode([Request(str(i), ids, max_new) for i, ids in enumerate(texts)], kind, draft, tree, batch, eos)
    for i in range(len(texts)):
        answer = answers[str(i)]
        assert is_greedy(kind, answer), (kind, draft, i)
        assert answer.finish == ("eos" if answer.tokens[-1] in eos else "length")
        assert not eos & set(answer.tokens[:-1]) and (len(answer.tokens) == max_new or answer.finish == "eos")
        assert sum(c.emitted for c in answer.cycles) == len(answer.tokens) - 1
        for cycle in answer.cycles:
            assert cycle.accepted <= cycle.proposed <= tree.max_depth
            assert cycle.cut or cycle.emitted == cycle.accepted + 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_noisy_draft_takes_side_branches(kind: str) -> None:
    """Without these the equality above would say nothing about moving keys."""
    drafter = TreeDrafter(Runner(DRAFTS[kind]["noise"], 3, 100))
    decoder = TreeDecoder(Runner(TARGETS[kind], 3, 100), (), drafter, TREE)
    for answer in decoder.run([Request(str(i), ids, 40) for i, ids in enumerate(prompts([3, 9, 14, 20, 5]))]):
        assert is_greedy(kind, answer) and len(answer.tokens) == 40
    assert sum(n for path, n in decoder.taken.items() if any(path)) >= 5
    assert sum(n for path, n in decoder.taken.items() if len(path) >= 2) >= 5
    rows = accept_by_rank(TREE, decoder.taken)
    assert rows[0][0] > rows[0][1] > 0


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_keys_left_where_they_were_give_another_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slab, "gather_path", lambda *_: None)
    texts = prompts([3, 9, 14])
    answers = decode([Request(str(i), ids, 40) for i, ids in enumerate(texts)], kind, "same", TREE, 3)
    assert not all(is_greedy(kind, answer) for answer in answers.values())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("batch", [1, 3])
def test_self_drafted_tree_accepts_its_full_depth(kind: str, batch: int) -> None:
    """And the draft's own slab is right after moves: a wrong key there would show as a rejection."""
    texts = prompts([1, 12, 25])
    answers = decode([Request(str(i), ids, 33) for i, ids in enumerate(texts)], kind, "same", TREE, batch)
    for answer in answers.values():
        assert is_greedy(kind, answer) and len(answer.tokens) == 33
        assert all(c.accepted == c.proposed for c in answer.cycles)
        assert [c.proposed for c in answer.cycles][:3] == [6, 6, 6]


def test_end_of_sequence_inside_the_tree() -> None:
    (ids,) = prompts([2], seed=4)
    whole = plain_greedy("llama", ids, 12)
    place = next(i for i in (3, 2, 4, 5) if whole[i] not in whole[:i])
    answer = decode([Request("a", ids, 12)], "llama", "same", TREE, 1, {whole[place]})["a"]
    assert answer.tokens == whole[: place + 1] and answer.finish == "eos"
    assert answer.cycles[-1].cut


@pytest.mark.parametrize("max_new", [1, 2, 3, 6])
def test_length_limit_inside_the_tree(max_new: int) -> None:
    (ids,) = prompts([5])
    answer = decode([Request("a", ids, max_new)], "llama", "same", TREE, 1)["a"]
    assert answer.tokens == plain_greedy("llama", ids, max_new) and answer.finish == "length"
    assert sum(c.proposed for c in answer.cycles) <= max_new - 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("draft", ["same", "noise"])
@pytest.mark.parametrize("batch", [1, 2])
def test_prompt_that_fills_the_context_to_the_last_slot(kind: str, draft: str, batch: int) -> None:
    """The tree shrinks as slots run out; the last tokens come without proposals."""
    texts = prompts([50, 31], seed=2)[:batch]
    requests = [Request(str(i), ids, 60 - len(ids)) for i, ids in enumerate(texts)]
    answers = decode(requests, kind, draft, TREE, batch, slots=60)
    for answer in answers.values():
        assert is_greedy(kind, answer) and len(answer.request.ids) + len(answer.tokens) == 60


def test_draft_whose_positions_end_before_the_targets() -> None:
    texts = prompts([30, 3, 8])
    drafter = TreeDrafter(Runner(DRAFTS["llama"]["noise"], 2, 34))
    decoder = TreeDecoder(Runner(TARGETS["llama"], 2, 100), (), drafter, TREE)
    for answer in decoder.run([Request(str(i), ids, 20) for i, ids in enumerate(texts)]):
        assert is_greedy("llama", answer) and len(answer.tokens) == 20


def test_shortlist_draft_and_kept_hidden_states() -> None:
    texts = prompts([6, 11])
    drafter = TreeDrafter(Runner(DRAFTS["llama"]["noise"], 2, 100, torch.arange(1, VOCAB, 2)))
    target = Runner(TARGETS["llama"], 2, 100)
    decoder = TreeDecoder(target, (), drafter, FIVE, keep_hidden=True)
    for answer in decoder.run([Request(str(i), ids, 20) for i, ids in enumerate(texts)]):
        assert is_greedy("llama", answer) and len(answer.tokens) == 20
        assert target.logits(torch.stack(answer.hidden)).argmax(-1).tolist() == answer.tokens


def test_many_keys_take_the_same_masks() -> None:
    """Past 2,048 keys a step on a CPU uses other kernels, over whole rows."""
    target, draft = build("llama", positions=4096), build("llama", 0.05, 4096)
    ids = tuple(torch.randint(0, VOCAB, (2100,), generator=torch.Generator().manual_seed(0)).tolist())
    for batch, length in ((1, 2100), (2, 1050)):
        drafter = TreeDrafter(Runner(draft, batch, 2200))
        decoder = TreeDecoder(Runner(target, batch, 2200), (), drafter, TREE)
        for answer in decoder.run([Request(str(row), ids[row * 40 : length], 16) for row in range(batch)]):
            assert is_greedy("llama", answer, 4096)
        assert len(decoder.taken) > 2


# -- the tree beside the chain


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chain_as_a_tree_decodes_as_the_chain(temperature: float) -> None:
    """Same tokens and cycles, sampling included: rank 0 has the chain's noise."""
    requests = [Request(str(i), ids, 25, temperature) for i, ids in enumerate(prompts([3, 9, 14, 20]))]
    target, draft = TARGETS["llama"], DRAFTS["llama"]["noise"]
    chain = Decoder(Runner(target, 3, 100), (), ModelDrafter(Runner(draft, 3, 100)), 4)
    tree = TreeDecoder(Runner(target, 3, 100), (), TreeDrafter(Runner(draft, 3, 100)), Tree.chain(4))
    want = {a.request.id: (a.tokens, a.cycles) for a in chain.run(requests)}
    assert {a.request.id: (a.tokens, a.cycles) for a in tree.run(requests)} == want


def test_rows_of_a_batch_equal_their_single_runs() -> None:
    requests = [Request(f"{t}-{i}", ids, 20, t) for i, ids in enumerate(prompts([3, 17, 30])) for t in (0.0, 0.9)]
    together = decode(requests, "llama", "noise", TREE, 6)
    for request in requests:
        alone = decode([request], "llama", "noise", TREE, 1)[request.id]
        assert (together[request.id].tokens, together[request.id].cycles) == (alone.tokens, alone.cycles)


def test_sibling_noise_is_its_own_and_rank_0_has_the_chains() -> None:
    key, position = torch.tensor([noise.request_key("a")])[:, None], torch.arange(20_000)
    purposes = [noise.sibling(p, r) for p in (noise.DRAFT, noise.ACCEPT, noise.FINAL) for r in range(3)]
    assert len(set(purposes)) == 9
    assert [noise.sibling(p, 0) for p in (noise.DRAFT, noise.ACCEPT, noise.FINAL)] == [0, 1, 2]
    u = torch.cat([noise.uniform(0, key, position, purpose) for purpose in purposes])
    off = torch.corrcoef(u) - torch.eye(9)
    assert off.abs().max() < 0.04


def test_phases_and_bad_trees() -> None:
    target, draft = Runner(TARGETS["llama"], 1, 100), Runner(DRAFTS["llama"]["noise"], 1, 100)
    clock = WallClock()
    decoder = TreeDecoder(target, (), TreeDrafter(draft), FIVE, clock=clock)
    list(decoder.run([Request("a", (1, 2), 10)]))
    assert set(clock.totals_ms()) == {"draft", "verify", "sampling"}
    with pytest.raises(ValueError, match="without proposals"):
        TreeDecoder(target, (), TreeDrafter(draft), Tree.chain(0))
    few = TreeDrafter(Runner(DRAFTS["llama"]["noise"], 1, 100, torch.tensor([3, 5])))
    wide = TreeDecoder(target, (), few, Tree((-1, 0, 0, 0)))
    with pytest.raises(ValueError, match="3 children; the draft's head has 2 rows"):
        list(wide.run([Request("a", (1, 2), 10)]))


def test_mixed_warps_never_propose_a_token_twice() -> None:
    """Greedy and sampling rows together, a draft whose top-p leaves less than there are siblings."""
    runner = Runner(DRAFTS["llama"]["noise"], 2, 100)
    seen: list[Tensor] = []

    class Watched(TreeDrafter):
        def propose_tree(self, batch, tree):  # type: ignore[no-untyped-def]
            proposal = super().propose_tree(batch, tree)
            seen.append(proposal.tokens)
            return proposal

    for warp in (None, Warp(1.0, 0, 0.2)):
        decoder = TreeDecoder(
            Runner(TARGETS["llama"], 2, 100), (), Watched(runner, warp=warp), Tree((-1, 0, 0, 0, 1, 1))
        )
        requests = [Request("g", (1, 2, 3), 20), Request("s", (4, 5), 20, 1.0)]
        greedy = {a.request.id: a.tokens for a in decoder.run(requests)}["g"]
        assert greedy == plain_greedy("llama", (1, 2, 3), 20)
    for tokens in seen:
        for row in tokens.tolist():
            for nodes in ((1, 2, 3), (4, 5)):
                assert len({row[n] for n in nodes if n < len(row)}) == sum(n < len(row) for n in nodes)
