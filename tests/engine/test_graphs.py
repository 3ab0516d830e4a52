"""CUDA graphs: bucket arithmetic, refusals, no wait for the device in what is captured; on CUDA captured == eager."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.attention import Window
from engine.cache import Slab, bucket, row_bucket
from engine.draft import Drafter, LookupDrafter, ModelDrafter
from engine.graphs import HostCopy, Step, check_graph, rope_types
from engine.kernels import BLOCKS, CHUNK, _flex, check_kernel, chunk_of, part_mask, split_attention
from engine.model import Runner
from engine.request import Answer, Request
from engine.ring import Ring
from engine.speculate import Decoder
from engine.warp import Warp, draws_of
from tests.engine.test_speculate import DRAFTS, TARGET, VOCAB, noisy, plain_greedy, tiny

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_buckets_are_few_and_waste_at_most_an_eighth() -> None:
    assert [bucket(n) for n in (1, 256, 257, 2048, 2049, 4096, 4097, 8193)] == [
        256, 256, 512, 2048, 2304, 4096, 4608, 9216,
    ]  # fmt: skip
    sizes = [bucket(n) for n in range(1, 40_000)]
    assert all(size >= n and bucket(size) == size for n, size in enumerate(sizes, 1))
    assert all((size - n) / size <= 1 / 8 for n, size in enumerate(sizes, 1) if n > 2048)
    assert len({size for size in sizes if 4096 < size <= 8192}) == 8


def test_rows_are_powers_of_two_up_to_the_slabs() -> None:
    assert [row_bucket(n, 6) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("rows,extent", [(1, 256), (3, 2048), (8, 8192), (8, 4608), (300, 8192), (2, 700), (264, 512)])
def test_parts_divide_the_keys_and_fill_the_device(rows: int, extent: int) -> None:
    chunk = chunk_of(rows, extent)
    assert extent % chunk == 0
    if rows >= BLOCKS or extent % CHUNK:
        assert chunk == extent
    else:
        assert chunk == CHUNK or rows * extent // chunk >= BLOCKS
        wider = 2 * chunk
        assert extent % wider or rows * extent // wider < BLOCKS


def test_draws_tell_the_batchs_kind() -> None:
    assert draws_of([0.0, 1e-6]) == "greedy"
    assert draws_of([0.7, 1.0]) == "sampled"
    assert draws_of([0.0, 1.0]) == "mixed"


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_graphs_on_a_cpu_are_refused() -> None:
    runner = Runner(tiny(0), 1, 64)
    with pytest.raises(ValueError, match="graph is true on cpu"):
        Decoder(runner, (), graph=True)
    with pytest.raises(ValueError, match="graph is true on cpu"):
        ModelDrafter(runner, graph=True)


def test_rotary_embeddings_that_look_from_the_host_are_refused() -> None:
    config = copy.deepcopy(TARGET.config)
    assert check_graph(True, torch.device("cuda"), config)
    assert not check_graph(False, torch.device("cpu"), config)
    config.rope_parameters = {"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic", "factor": 2.0}}
    assert rope_types(config.rope_parameters) == {"default", "dynamic"}
    with pytest.raises(ValueError, match="dynamic rotary"):
        check_graph(True, torch.device("cuda"), config)


def test_attention_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"flex.*needs CUDA"):
        Runner(tiny(0), 1, 64, attention="flex")
    with pytest.raises(ValueError, match="must be one of"):
        check_kernel("flash", torch.device("cpu"))


# -- the parts' attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch,heads,tokens,chunk", [(1, 2, 6, 64), (3, 2, 1, 32), (2, 1, 5, 256), (1, 1, 4, 16)])
def test_parts_joined_equal_the_whole(batch: int, heads: int, tokens: int, chunk: int) -> None:
    """Against float64; lengths leave whole parts without a visible key, and the slab is wider than what is read."""
    generator = torch.Generator().manual_seed(batch)
    extent, width = 256, 16
    query = torch.randn(batch, heads, tokens, width, generator=generator)
    slab = torch.randn(2, batch + 1, heads, extent + 128, width, generator=generator)
    keys, values = slab[0, :batch, :, :extent], slab[1, :batch, :, :extent]
    lengths = torch.tensor([5, 100, 256])[:batch]
    visible = torch.arange(extent) < (lengths[:, None, None] - torch.arange(tokens).flip(0)[:, None]).clamp(min=1)
    mask = torch.zeros(batch, 1, tokens, extent).masked_fill(~visible[:, None], -torch.inf)
    scores = query.double() @ keys.double().transpose(2, 3) * 0.3 + mask.double()
    want = torch.softmax(scores, -1) @ values.double()
    got = split_attention(query, keys, values, part_mask(mask, heads, chunk), 0.3)
    assert torch.isfinite(got).all()
    assert (got - want).norm() / want.norm() < 1e-6


def test_masks_stay_finite_in_every_type() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = torch.full((1, 1, 2, 32), -torch.inf, dtype=dtype)
        assert torch.isfinite(part_mask(mask, 2, 16)).all()


# -- fixed shapes, eager on a CPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "split"])
@pytest.mark.parametrize("drafter", ["none", "noise", "lookup"])
def test_fixed_shapes_give_the_plain_models_tokens(drafter: str, attention: str) -> None:
    """What CUDA runs (padded rows, bucketed extents, one k to the end) on a CPU: greedy rows stay exact."""
    generator = torch.Generator().manual_seed(3)
    prompts = [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in (3, 17, 60, 9, 30)]
    target = Runner(TARGET, 3, 120, attention=attention, fixed=True)
    used: Drafter | None = None
    if drafter == "noise":
        used = ModelDrafter(Runner(DRAFTS["noise"], 3, 120, attention=attention, fixed=True))
    elif drafter == "lookup":
        used = LookupDrafter()
    decoder = Decoder(target, {5}, used, 0 if used is None else 4)
    answers = {a.request.id: a for a in decoder.run(Request(str(i), ids, 30) for i, ids in enumerate(prompts))}
    for i, ids in enumerate(prompts):
        assert answers[str(i)].tokens == plain_greedy(list(ids), 30, {5})
    assert target.max_positions == 120 and target.slab.capacity == 256


def test_rows_beyond_the_batch_do_not_grow() -> None:
    """Else their positions would leave the slab while the batch stays the same for long."""
    runners = [Runner(tiny(0), 4, 200, fixed=True) for _ in range(2)]
    decoder = Decoder(runners[0], (), ModelDrafter(runners[1]), 8)
    for row in range(3):
        decoder.admit(Request(str(row), (5, 6, 7), 150))
    while len(decoder.active) == 3:
        decoder.cycle()
    length = decoder._kept[4].length
    assert length[3] == 2 and length[0] > 100


def test_fixed_shapes_draw_the_same_samples() -> None:
    """A row beyond the batch, a wider extent and k kept to the end change no sample."""
    ids = tuple(range(1, 9))

    def answers(fixed: bool, k: int) -> list[list[int]]:
        drafter = ModelDrafter(Runner(DRAFTS["noise"], 3, 120, fixed=fixed), 5) if k else None
        decoder = Decoder(Runner(TARGET, 3, 120, fixed=fixed), (), drafter, k, seed=5)
        requests = [Request(f"r{i}", ids, 25, temperature) for i, temperature in enumerate((0.9, 0.0, 0.7))]
        found = {a.request.id: a.tokens for a in decoder.run(requests)}
        return [found[f"r{i}"] for i in range(3)]

    assert answers(True, 0) == answers(False, 0)
    assert answers(True, 3) == answers(False, 3)


# -- nothing in a captured function waits for the device --------------------------------------------------------------


WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"}


class NoWaits(TorchDispatchMode):
    """Fails on every operator that a GPU would answer by waiting, or whose shape depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            assert all(i is None or i.dtype == torch.long for i in args[1]), "an index of booleans has no fixed shape"
        return func(*args, **(kwargs or {}))


SETTINGS = [("greedy", None), ("sampled", None), ("mixed", None), ("sampled", Warp(0.5, 3, 0.9)), ("mixed", Warp(0.0))]


@pytest.fixture
def checked_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every eager call of a `Step` runs under `NoWaits`; the list counts them."""
    calls = [0]

    def call(self: Step, static: tuple[Any, ...], *inputs: Tensor | None) -> Any:
        calls[0] += 1
        with torch.inference_mode(), NoWaits():
            return self.function(*static, *inputs)

    monkeypatch.setattr(Step, "__call__", call)
    yield calls


def test_the_watch_sees_a_wait() -> None:
    for wait in (lambda x: bool(x.any()), lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero()):
        with pytest.raises(AssertionError), NoWaits():
            wait(torch.ones(3))


@pytest.mark.parametrize("draws,warp", SETTINGS)
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("lookup", [False, True])
def test_steps_do_not_wait_on_a_cpu(
    checked_steps: list[int], draws: str, warp: Warp | None, k: int, lookup: bool
) -> None:
    # Two rows: a single one on a CPU writes by a host index, which is the CPU's own way.
    temperature = {"greedy": (0.0, 0.0), "sampled": (0.8, 1.0), "mixed": (0.0, 1.0)}[draws]
    drafter: Drafter = (
        LookupDrafter()
        if lookup
        else ModelDrafter(Runner(DRAFTS["noise"], 2, 120, torch.arange(0, VOCAB, 2), fixed=True), 1, warp)
    )
    decoder = Decoder(Runner(TARGET, 2, 120, fixed=True), (), drafter if k else None, k, 1, 7, 0.9)
    for row in range(2):
        decoder.admit(Request(str(row), (1, 2, 1, 2, 1), 12, temperature[row]))
    while decoder.active:
        decoder.cycle()
    assert checked_steps[0] > 0


@pytest.mark.parametrize("draws,warp", SETTINGS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("attention,recent", [("sdpa", None), ("split", None), ("split", 500)])
def test_steps_do_not_need_a_value_off_the_cpu(
    draws: str, warp: Warp | None, batch: int, k: int, attention: str, recent: int | None
) -> None:
    """The branches that a GPU takes, on the meta device: shapes but no values, so whatever asks for one raises."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"), torch.inference_mode():
        models = [LlamaForCausalLM(copy.deepcopy(config)).bfloat16().eval() for _ in range(2)]
        target = Runner(models[0], batch, 1000, attention=attention, fixed=True)
        draft = Runner(models[1], batch, 600, attention=attention, fixed=True, recent=recent)
        assert target.slab.capacity == 1024 and draft.slab.capacity == 768
        drafter = ModelDrafter(draft, warp=warp)
        decoder = Decoder(target, (), drafter if k else None, k, top_p=0.9, top_k=5)
        last, length = torch.ones(batch, 2, dtype=torch.long), torch.ones(batch, dtype=torch.long)
        temperature, keys = torch.ones(batch), torch.ones(batch, dtype=torch.long)
        tokens, q = last[:, :0], None
        if k:
            extents = tuple(draft.extent(300 + j, 300 + k) for j in range(k))
            assert extents == (512,) * k
            draft_draws = draws if warp is None else draws_of([warp.temperature])
            tokens, q = drafter._draft(draft_draws, extents, last, length, temperature, keys)
            assert tokens.shape == (batch, k) and (q is None) == (draft_draws == "greedy")
        hidden, logits = decoder._run_target(target.extent(300 + k, 300 + k), last, length, tokens)
        assert logits.shape == (batch, k + 1, 320) and logits.device.type == "meta"
        drawn = torch.arange(0 if draws == "greedy" else batch)
        state = last, length, temperature, keys, torch.ones_like(keys), length + 9, drawn
        (result,) = decoder._run_accept(draws, logits, *state, tokens, q, None, None)
        assert result.shape == (batch, k + 3) and hidden.shape == (batch, k + 1, 64)


def test_the_meta_device_sees_a_wait() -> None:
    x = torch.ones(3, device="meta")
    for wait in (lambda: bool(x.any()), lambda: x[x > 0], lambda: x.tolist()):
        with pytest.raises((NotImplementedError, RuntimeError)):
            wait()


# -- a graph played on a CPU ------------------------------------------------------------------------------------------


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: it writes down every operator with its tensors and runs them again at a replay.

    As on a GPU no Python runs at a replay, every tensor keeps its address, and what Python decided stays decided.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        def storages(tree: Any) -> set[int]:
            tensors = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.numel()]
            return {x.untyped_storage().data_ptr() for x in tensors if not x.is_mkldnn}  # a packed weight has none

        for func, args, kwargs, out in self.ops:
            changes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            shares = storages(out) & storages((args, kwargs))
            if shares and not changes:
                continue  # a view
            new = func(*args, **kwargs)
            if not shares:
                for old, fresh in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(fresh)


class Stream:
    def wait_stream(self, other: Any) -> None:
        """One queue: nothing to wait for."""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few names of torch.cuda that a capture uses, played by a `Tape`."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", lambda tape, pool: tape)


@pytest.mark.parametrize(
    "kind,k,temperatures,attention",
    [
        ("none", 0, (0.0, 0.0), "split"),
        ("none", 0, (0.0, 0.9), "sdpa"),
        ("noise", 4, (0.0, 0.0), "sdpa"),
        ("noise", 4, (0.8, 1.0), "split"),
        ("noise", 3, (0.0, 0.9), "split"),
        ("lookup", 3, (0.0, 0.9), "split"),
        ("shortlist", 2, (0.8, 1.0), "sdpa"),
    ],
)
def test_replays_equal_eager_runs(
    played: None, kind: str, k: int, temperatures: tuple[float, ...], attention: str
) -> None:
    """Rows come, go and leave gaps, and a length crosses into another bucket."""
    found: list[dict[str, Answer]] = []
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (3, 245, 17, 8)]
    for graph in (False, True):
        models = [tiny(0, positions=600), noisy(tiny(0, positions=600), 0.15)]
        short = torch.arange(1, VOCAB, 2) if kind == "shortlist" else None
        runners = [Runner(m, 3, 300, s, None, attention, True) for m, s in zip(models, (None, short), strict=True)]
        for runner in runners:
            runner.slab.ensure(runner.slab.capacity)  # a CPU's slab moves when it grows; a GPU's never does
        drafter: Drafter | None = None
        if kind == "lookup":
            drafter = LookupDrafter()
        elif kind != "none":
            drafter = ModelDrafter(runners[1], 3)
            drafter._steps.graph = graph
        decoder = Decoder(runners[0], {5}, drafter, k, seed=3, top_p=0.95)
        decoder._verify.graph = decoder._accept.graph = graph
        requests = [Request(str(i), tuple(p), 20, temperatures[i % 2]) for i, p in enumerate(prompts)]
        found.append({a.request.id: a for a in decoder.run(requests)})
        assert (decoder.num_graphs > 2) == graph
    assert len(found[0]) == len(prompts)
    for name, answer in found[0].items():
        assert found[1][name].tokens == answer.tokens and found[1][name].cycles == answer.cycles
        if answer.request.temperature == 0 and len(answer.request.ids) < 100:
            assert answer.tokens == plain_greedy(list(answer.request.ids), 20, {5})


def test_one_drafter_serves_two_decoders_in_turns(played: None) -> None:
    """Its graph reads copies: cycles of the one decoder leave the other's state alone."""
    runners = [Runner(m, 1, 200, fixed=True) for m in (tiny(0), DRAFTS["noise"])]
    drafter = ModelDrafter(runners[1])
    decoders = [Decoder(Runner(tiny(0), 1, 200, fixed=True), (), drafter, 3) for _ in range(2)]
    for step in (drafter._steps, *(s for d in decoders for s in (d._verify, d._accept))):
        step.graph = True
    for runner in (runners[1], *(d.target for d in decoders)):
        runner.slab.ensure(runner.slab.capacity)
    answers = [d.admit(Request(str(i), ids, 30)) for i, (d, ids) in enumerate(zip(decoders, ((4, 9, 2), (7, 7, 1, 3))))]
    while any(not a.finish for a in answers):
        for decoder in decoders:
            if decoder.active:
                decoder.cycle()
    for answer in answers:  # the draft's slab row is shared, so acceptance suffers; the answers must not
        assert answer.tokens == plain_greedy(list(answer.request.ids), 30, set())


def test_a_capture_leaves_its_inputs_as_they_were(played: None) -> None:
    def grow(x: Tensor) -> tuple[Tensor]:
        x.add_(1)
        return (x * 2,)

    x, step = torch.zeros(4), Step(grow)
    step.graph = True
    with torch.inference_mode():
        assert step((), x)[0].tolist() == [2.0] * 4 and x.tolist() == [1.0] * 4
        assert step((), x)[0].tolist() == [4.0] * 4 and step.num_captured == 1
        assert step((), torch.full((4,), 9.0))[0].tolist() == [20.0] * 4 and step.num_captured == 1
        step((), torch.zeros(3))
    assert step.num_captured == 2


# -- the compiled kernel, traced --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sliding,recent", [(None, None), (7, None), (40, 32)])
def test_flex_sees_what_the_window_sees(sliding: int | None, recent: int | None) -> None:
    """Its function, traced whole (no graph break) but run by plain torch, against the masked attention."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, groups, tokens, extent, width = 2, 2, 3, 4, 64, 16
    ring = None if recent is None else Ring(2, recent, extent)
    slab = Slab(1, batch, heads, extent, width, torch.float32, ring=ring)
    slab.ensure(extent)
    for layer in (slab.key[0], slab.value[0]):
        layer.copy_(torch.randn(layer.shape, generator=generator))
    query = torch.randn(batch, heads, groups * tokens, width, generator=generator)
    positions = torch.tensor([[9], [50 if recent is None else 150]]) + torch.arange(tokens)
    window = Window(slab, positions, extent, static=True)
    mask = window.mask(sliding, groups, torch.float32)
    want = torch.nn.functional.scaled_dot_product_attention(query, *window.read(0), attn_mask=mask, scale=0.3)
    traced = torch.compile(_flex, backend="eager", dynamic=False, fullgraph=True)
    with torch.inference_mode():
        parts = None if ring is None else (ring.sinks, ring.recent, ring.turn)
        got = traced(query, *window.read(0), positions, 0.3, sliding, parts)
    assert torch.allclose(got, want, atol=1e-5)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return copy.deepcopy(model).to("cuda", dtype)


def run(
    graph: bool, k: int, batch: int, temperatures: tuple[float, ...], attention: str, kind: str = "noise"
) -> tuple[dict[str, Answer], Decoder]:
    """Six requests over `batch` rows on the GPU, so that rows come, go and leave gaps."""
    target = Runner(on_gpu(TARGET), batch, 200, attention=attention)
    used: Drafter | None = None
    if k and kind == "lookup":
        used = LookupDrafter(device="cuda")
    elif k:
        used = ModelDrafter(Runner(on_gpu(DRAFTS[kind]), batch, 200, attention=attention), 3, graph=graph)
    decoder = Decoder(target, {5}, used, k, seed=3, top_p=0.95, graph=graph)
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(str(i), tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()), 40, temperatures[i % 2])
        for i, n in enumerate((3, 40, 17, 100, 8, 60))
    ]
    return {a.request.id: a for a in decoder.run(requests)}, decoder


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("attention", ["sdpa", "split"])
@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.8, 1.0), (0.0, 0.9)])
@pytest.mark.parametrize("k,batch", [(0, 1), (0, 4), (1, 1), (4, 1), (4, 3), (8, 4)])
def test_captured_equals_eager(k: int, batch: int, temperatures: tuple[float, ...], attention: str) -> None:
    eager, _ = run(False, k, batch, temperatures, attention)
    captured, decoder = run(True, k, batch, temperatures, attention)
    assert decoder._verify.num_captured > 0 and decoder._accept.num_captured > 0
    for name, answer in eager.items():
        assert captured[name].tokens == answer.tokens
        assert captured[name].cycles == answer.cycles


@pytest.mark.gpu
@needs_cuda
def test_captured_look_up_equals_eager() -> None:
    for temperatures in ((0.0, 0.0), (0.7, 0.7)):
        eager, _ = run(False, 4, 2, temperatures, "split", "lookup")
        captured, _ = run(True, 4, 2, temperatures, "split", "lookup")
        assert {n: a.tokens for n, a in captured.items()} == {n: a.tokens for n, a in eager.items()}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "split"])
def test_greedy_on_the_gpu_equals_the_plain_model(graph: bool, attention: str) -> None:
    answers, _ = run(graph, 4, 2, (0.0, 0.0), attention)
    for answer in answers.values():
        assert answer.tokens == plain_greedy(list(answer.request.ids), 40, {5})


@pytest.mark.gpu
@needs_cuda
def test_one_drafter_serves_two_decoders_on_the_gpu() -> None:
    drafter = ModelDrafter(Runner(on_gpu(DRAFTS["noise"]), 1, 200), graph=True)
    target = Runner(on_gpu(TARGET), 1, 200)
    first = Decoder(target, (), drafter, 3, graph=True)
    second = Decoder(target, (), drafter, 3, graph=True)
    ids = (4, 9, 2)
    for decoder in (first, second, first, second):
        answer = next(iter(decoder.run([Request("a", ids, 30)])))
        assert answer.tokens == plain_greedy(list(ids), 30, set())


@pytest.mark.gpu
@needs_cuda
def test_a_capture_on_the_gpu_leaves_the_inputs_as_they_were() -> None:
    def grow(x: Tensor) -> tuple[Tensor]:
        x.add_(1)
        return (x * 2,)

    x = torch.zeros(4, device="cuda")
    step = Step(grow, graph=True)
    assert step((), x)[0].tolist() == [2.0] * 4 and x.tolist() == [1.0] * 4
    assert step((), x)[0].tolist() == [4.0] * 4 and step.num_captured == 1
    assert HostCopy()(torch.tensor([[1, 2]], device="cuda")) == [[1, 2]]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kernel", ["sdpa", "split", "flex"])
def test_attention_on_the_gpu_against_float64(kernel: str) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    plain = copy.deepcopy(model).double()
    for batch, lengths in ((1, [1500]), (3, [1500, 20, 700])):
        runner = Runner(on_gpu(model, torch.bfloat16), batch, 2048, attention=kernel)
        text = torch.randint(0, 64, (batch, 1510), generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            for row, n in enumerate(lengths):
                runner.prefill(text[row, :n].cuda(), row)
            ids = torch.stack([text[row, n : n + 4] for row, n in enumerate(lengths)]).cuda()
            hidden = runner.step(ids, torch.tensor(lengths, device="cuda"), runner.extent(max(lengths) + 4, 1504))
            got = hidden.cpu().double()
            for row, n in enumerate(lengths):
                want = plain.model(text[row : row + 1, : n + 4]).last_hidden_state[0, -4:]
                assert float((got[row] - want).norm() / want.norm()) < 2e-2


@pytest.mark.gpu
@needs_cuda
def test_a_host_decision_is_an_error() -> None:
    """The last test of the file: a broken capture may leave the process's allocator unfit for the next one."""

    def decide(x: Tensor) -> tuple[Tensor]:
        return (x if bool(x.sum() > 0) else -x,)

    with pytest.raises(RuntimeError):
        Step(decide, graph=True)((), torch.zeros(4, device="cuda"))
