"""Which answers meet in which batch; several of them in one row give what each gives in a row of its own."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
)

from distill.batches import BatchPlan, Windows, pack
from distill.branches import PAD
from distill.module import DraftModule
from distill.schema import Distill
from distill.teacher import Batch, ResponseDataset, TeacherError, width_of
from distill.teacher_topk import write_topk
from tests.conftest import make_config, make_llama, make_noisy, make_target
from tests.distill.test_module import make_module, run, write_answers
from tests.distill.test_teacher import write_folder

SIZES = [(5, 3), (9, 12), (3, 7), (2, 11), (17, 9), (1, 1), (14, 12), (1, 6)]  # tokens of prompt and answer
KINDS = ("llama", "qwen2", "gemma2", "gemma3")


def test_batches_keep_the_budget_and_see_every_row_once_an_epoch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 300, (500,), generator=generator).tolist() + [5000]
    plan = BatchPlan(lengths, 2048, seed=3)
    for number in range(2):
        batches = plan.epoch(number)
        assert sorted(itertools.chain(*batches)) == list(range(501))
        for batch in batches:
            padded = len(batch) * max(lengths[row] for row in batch)
            assert padded <= 2048 or batch == [500]
        assert len({len(batch) for batch in batches}) > 3
    assert plan.epoch(0) != plan.epoch(1)
    filled = sum(lengths[:500]) / sum(len(b) * max(lengths[r] for r in b) for b in plan.epoch(0) if b != [500])
    assert filled > 0.9
    assert BatchPlan(lengths, 2048, seed=3).epoch(1) == plan.epoch(1)
    assert BatchPlan(lengths, 2048, seed=4).epoch(1) != plan.epoch(1)


@pytest.mark.parametrize("packed", [False, True])
def test_t42_any_batch_can_be_asked_for_without_the_ones_before(packed):
    plan = BatchPlan(list(range(5, 65)), 200, 1, packed)
    in_order = [plan[number] for number in range(40)]
    epochs = [batch for number in range(4) for batch in plan.epoch(number)]
    assert in_order == epochs[:40]
    for number in (39, 7, 0, 25):
        assert BatchPlan(list(range(5, 65)), 200, 1, packed)[number] == in_order[number]
        assert plan[number] == in_order[number]


def test_impossible_plans_are_refused():
    with pytest.raises(TeacherError, match="0 rows"):
        BatchPlan([], 100, 0)
    with pytest.raises(TeacherError, match="0 tokens"):
        BatchPlan([3], 0, 0)


@pytest.mark.parametrize(("workers", "packed"), [(0, False), (2, False), (0, True), (2, True)])
def test_t42_windows_resume_at_a_step_whatever_the_workers(tmp_path, workers, packed):
    data = ResponseDataset(write_folder(tmp_path, [(3, 1 + n % 7) for n in range(20)]), max_length=64)

    def steps(start: int, count: int, rank: int = 0, ranks: int = 1) -> list[list[tuple[int, ...]]]:
        windows = Windows(data, BatchPlan(data.lengths, 30, 5, packed), 2, start, rank, ranks)
        loader = DataLoader(windows, batch_size=None, num_workers=workers)
        return [[batch.rows for batch in window] for window in itertools.islice(loader, count)]

    straight = steps(0, 12)
    assert all(len(window) == 2 for window in straight)
    assert steps(7, 5) == straight[7:]
    flat = list(itertools.chain(*straight))
    both = [steps(0, 3, rank, 2) for rank in range(2)]
    assert [*both[0][0], *both[1][0], *both[0][1], *both[1][1]] == flat[:8]


def padded_tok(plan: BatchPlan, number: int) -> list[int]:
    """Padded tokens of each batch of an epoch, its answers laid as `pack` lays them."""
    found = []
    for rows in plan.epoch(number):
        lines = [0]
        for row in rows:
            if lines[-1] and lines[-1] + plan.lengths[row] > plan.width:
                lines.append(0)
            lines[-1] += plan.lengths[row]
        found.append(len(lines) * max(lines))
    return found


def test_packed_batches_keep_the_budget_and_mix_lengths():
    lengths = torch.randint(10, 300, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = BatchPlan(lengths, 2048, 3, packed=True)
    assert plan.width == max(lengths)
    for number in range(2):
        assert sorted(itertools.chain(*plan.epoch(number))) == list(range(500))
        assert max(padded_tok(plan, number)) <= 2048
    assert plan.epoch(0) != plan.epoch(1)
    plain = BatchPlan(lengths, 2048, 3)
    sorted_tok = sum(len(batch) * max(lengths[row] for row in batch) for batch in plain.epoch(0))
    assert sum(lengths) / sum(padded_tok(plan, 0)) > max(0.95, sum(lengths) / sorted_tok)

    def spread(batches: list[list[int]]) -> float:
        means = [sum(lengths[row] for row in batch) / len(batch) for batch in batches]
        return max(means) - min(means)

    assert spread(plan.epoch(0)) < 0.5 * spread(plain.epoch(0))


def test_a_row_beyond_the_budget_is_a_packed_batch_of_its_own():
    lengths = [30] * 20 + [500]
    plan = BatchPlan(lengths, 100, 3, packed=True)
    assert plan.width == 100 and [20] in plan.epoch(0)
    assert sorted(padded_tok(plan, 0))[-2:] == [90, 500]


def test_the_rows_of_the_worked_example(tmp_path):
    data = ResponseDataset(write_folder(tmp_path, [(3, 2), (1, 2), (2, 3)]), max_length=100)
    packed = pack(data.collate([0, 1, 2]), data.lengths, 7)
    assert packed.input_ids.shape == (2, 16) and not packed.input_ids[:, 6:].any()
    assert packed.input_ids[:, :6].tolist() == [[0, 1, 2, 3, 100, 101], [200, 201, 202, 203, 0, 0]]
    assert packed.layout is not None and bool((packed.layout.branch[:, 6:] == PAD).all())
    assert packed.layout.position[:, :6].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 0]]
    assert packed.layout.branch[:, :6].tolist() == [[1, 1, 1, 1, 2, 2], [3, 3, 3, 3, PAD, PAD]]
    whole = packed.layout.sees()[:, 0]
    assert torch.equal(whole[:, 6:], torch.eye(16).bool()[6:].expand(2, -1, -1)) and not whole[:, :6, 6:].any()
    seen = whole[:, :6, :6]
    assert torch.equal(seen[0], torch.block_diag(torch.ones(4, 4).tril(), torch.ones(2, 2).tril()).bool())
    assert torch.equal(seen[1], torch.block_diag(torch.ones(4, 4).tril(), torch.eye(2)).bool())
    inputs = packed.input_ids[packed.positions[:, 0], packed.positions[:, 1]]
    assert (inputs + 1).tolist() == packed.labels.tolist()
    assert packed.place.tolist() == data.collate([0, 1, 2]).place.tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert packed.rows == (0, 1, 2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, t_tied: PreTrainedModel) -> Path:
    folder = write_answers(tmp_path_factory.mktemp("answers") / "a", t_tied, SIZES)
    write_topk(folder, t_tied.get_output_embeddings().weight, 16)
    return folder


def both(data: ResponseDataset, rows: list[int]) -> tuple[Batch, Batch]:
    """Rows side by side, and packed into lines of 32 tokens."""
    plain = data.collate(rows)
    packed = pack(plain, [data.lengths[row] for row in rows], 32)
    assert len(packed.input_ids) < len(plain.input_ids) and packed.input_ids.shape[1] <= 32
    return plain, packed


def draft(kind: str) -> PreTrainedModel:
    """A tiny draft; layers of all but the llama see six positions, in gemma and qwen2 not all of them."""
    if kind == "llama":
        return make_llama()
    if kind == "qwen2":
        config = make_config(layers=2)
        config.use_sliding_window, config.sliding_window = True, 6
        config.layer_types = ["full_attention", "sliding_attention"]
        return make_target(config, seed=3)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6}
    shape |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    torch.manual_seed(0)
    if kind == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**shape)).eval()
    return Gemma3ForCausalLM(Gemma3TextConfig(**shape)).eval()


class Keeper(torch.optim.SGD):
    """An optimizer that moves nothing and keeps every gradient."""

    def __init__(self, module: DraftModule) -> None:
        super().__init__(module.parameters(), lr=0.0)
        self.module, self.kept = module, {}

    def step(self, closure=None) -> None:  # type: ignore[no-untyped-def, override]
        if closure is not None:
            closure()
        self.kept = {name: value.grad.clone() for name, value in self.module.named_parameters()}


def step(module: DraftModule, window: list[Batch]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """What a step says of itself, and its gradients."""
    keeper = Keeper(module)
    module.configure_optimizers = lambda: keeper  # type: ignore[assignment, method-assign]
    run(module, [window])
    return {name: value for name, value in module.taken.items() if name != "reference_ms"}, keeper.kept


def check_step(make, data: ResponseDataset) -> None:  # type: ignore[no-untyped-def]
    """A step on a window of packed batches is the step on the same rows side by side."""
    plain, packed = zip(both(data, [0, 1, 2, 3]), both(data, [4, 5, 6, 7]))
    wanted, gradients = step(make(), list(plain))
    taken, found = step(make(), list(packed))
    assert taken == pytest.approx(wanted, rel=1e-5)
    assert found.keys() == gradients.keys()
    scale = max(float(value.abs().max()) for value in gradients.values())
    assert scale > 1e-4
    for name, value in gradients.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_t21_packed_rows_have_the_states_loss_and_gradients_of_single_ones(
    kind: str, t_tied: PreTrainedModel, answers: Path
) -> None:
    data, stage = ResponseDataset(answers, 64), Distill(grad_clip=0.0)
    module = make_module(t_tied, stage, draft(kind))
    with torch.no_grad():
        for plain, packed in (both(data, [0, 1, 2, 3]), both(data, [4, 5, 6, 7])):
            torch.testing.assert_close(module.hidden(packed), module.hidden(plain), rtol=1e-4, atol=1e-5)
    check_step(lambda: make_module(t_tied, stage, draft(kind)), data)


LOSSES = {"forward_kl": 1.0, "reverse_kl": 0.5, "jsd": 0.5, "tv": 0.5, "neg_log_alpha": 0.5, "cross_entropy": 0.5}


@pytest.mark.parametrize(
    "case", ["losses", "kl_tv", "survival", "topk", "live", "live gemma3", "reference", "shortlist"]
)
def test_t21_whatever_is_trained_on_packed_rows_are_single_ones(
    case: str, t_tied: PreTrainedModel, answers: Path
) -> None:
    given: dict[str, object] = {"grad_clip": 0.0, "outside_rows": 64}
    more: dict[str, object] = {}
    target = t_tied
    if case == "losses":
        given |= {"loss": LOSSES}
    elif case == "kl_tv":
        given |= {"loss": {"kl_tv": 1.0}}
    elif case == "survival":
        given |= {"survival_k": 4}
    elif case == "live":
        more = {"live": make_noisy(t_tied)}
    elif case == "live gemma3":
        target = draft("gemma3")
        more = {"live": copy.deepcopy(target)}
    elif case == "reference":
        given |= {"reference": "somewhere", "select_frac": 0.5}
        more = {"reference": make_target(make_config(layers=2), seed=8)}
    elif case == "shortlist":
        more = {"shortlist": torch.arange(0, 512, 2)}
    data, stage = ResponseDataset(answers, 64, topk=case == "topk"), Distill(**given)  # type: ignore[arg-type]
    check_step(lambda: make_module(target, stage, **more), data)


@pytest.mark.parametrize("kind", KINDS)
def test_t21_an_answer_sees_nothing_of_its_neighbours(kind: str, t_tied: PreTrainedModel, answers: Path) -> None:
    """Other tokens in one answer change its own states and leave all others' as they are, to the last bit."""
    data = ResponseDataset(answers, 64)
    module = make_module(t_tied, Distill(), draft(kind))
    _, packed = both(data, [0, 2, 4, 5, 7, 3])
    assert packed.layout is not None
    other = copy.deepcopy(packed)
    other.input_ids[packed.layout.branch == 3] += 1
    own = packed.layout.branch[packed.positions[:, 0], packed.positions[:, 1]] == 3
    with torch.no_grad():
        states, changed = module.hidden(packed), module.hidden(other)
    assert torch.equal(states[~own], changed[~own])
    assert (states[own] != changed[own]).any(1).all()


def test_windows_hold_packed_rows_of_their_plan(tmp_path):
    data = ResponseDataset(write_folder(tmp_path, [(3, 1 + n % 7) for n in range(40)]), max_length=64)
    plan = BatchPlan(data.lengths, 30, 5, packed=True)
    for number, window in enumerate(itertools.islice(Windows(data, plan, 2), 6)):
        for batch, rows in zip(window, (plan[2 * number], plan[2 * number + 1])):
            assert batch.rows == tuple(rows) and len(batch.input_ids) * plan.width <= 30
            assert batch.input_ids.shape[1] <= width_of(plan.width)
            plain = data.collate(rows)
            assert torch.equal(batch.labels, plain.labels) and torch.equal(batch.place, plain.place)
            assert torch.equal(batch.hidden_target, plain.hidden_target)
            at = batch.positions[:, 0], batch.positions[:, 1]
            assert (
                batch.input_ids[at].tolist() == plain.input_ids[plain.positions[:, 0], plain.positions[:, 1]].tolist()
            )
            assert batch.to("cpu").layout is not None
