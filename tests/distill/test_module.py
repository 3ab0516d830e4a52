"""The training module: denominators, precision, gradients of the head's rows, what a checkpoint holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from distill.draft import low_rank_factors
from distill.loss_reference import divergence
from distill.module import DraftModule, TrainingDiverged
from distill.optimizers import learning_rate
from distill.schema import Distill
from distill.sharded import add_gradient
from distill.teacher import Batch, ResponseDataset
from tests.conftest import make_config, make_target

PROMPTS = [(5, 3), (9, 20), (30, 7), (2, 11), (17, 17), (4, 1), (40, 12), (8, 8)]  # tokens of prompt and answer


def write_answers(folder: Path, target: PreTrainedModel, sizes: Sequence[tuple[int, int]] = PROMPTS) -> Path:
    """Random prompts with the target's greedy answers and states, in the shards' format."""
    generator = torch.Generator().manual_seed(0)
    rows, states = [], []
    for number, (prompt, answer) in enumerate(sizes):
        ids = torch.randint(5, 500, (1, prompt), generator=generator)
        for _ in range(answer):
            with torch.no_grad():
                ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
        with torch.no_grad():
            hidden = target.model(ids[:, :-1]).last_hidden_state[0, prompt - 1 :]
        states.append(hidden.bfloat16())
        row = {"id": str(number), "domain": ("code", "math")[number % 2], "temperature": 0.0, "finish": "length"}
        row |= {"prompt_ids": ids[0, :prompt].tolist(), "answer_ids": ids[0, prompt:].tolist(), "reference": False}
        rows.append(json.dumps(row))
    folder.mkdir(parents=True)
    (folder / "rows-00000.jsonl").write_text("\n".join(rows) + "\n")
    save_file({"hidden": torch.cat(states).contiguous()}, folder / "hidden-00000.safetensors")
    shards = [{"shard": 0, "rows": len(rows), "tokens": sum(answer for _, answer in sizes)}]
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "settings": {}, "shards": shards, "complete": True}))
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, t_tied: PreTrainedModel) -> ResponseDataset:
    return ResponseDataset(write_answers(tmp_path_factory.mktemp("answers") / "a", t_tied), max_length=64)


def small_draft(tied: bool = True) -> PreTrainedModel:
    return make_target(make_config(tied=tied, layers=2), seed=3)


def make_module(target: PreTrainedModel, stage: Distill, draft: PreTrainedModel | None = None, **kwargs) -> DraftModule:  # type: ignore[no-untyped-def]
    return DraftModule(draft or small_draft(), target.get_output_embeddings().weight, stage, **kwargs)


def run(module: DraftModule, windows: Sequence[Sequence[Batch]], precision: str = "32-true") -> pl.Trainer:
    """Trains one step on each window."""
    trainer = pl.Trainer(
        max_steps=len(windows),
        accelerator="cpu",
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(list(windows), batch_size=None))
    return trainer


def reference_gradient(module: DraftModule, batch: Batch, target: PreTrainedModel) -> tuple[torch.Tensor, float]:
    """Gradient of the table, and value, of the plain mean loss over all supervised tokens, whole head."""
    draft, teacher = copy.deepcopy(module.draft), target.get_output_embeddings().weight.detach()
    states = draft.model(batch.input_ids).last_hidden_state[batch.positions[:, 0], batch.positions[:, 1]]
    loss = divergence("forward_kl", batch.hidden_target.float() @ teacher.T, states @ draft.lm_head.weight.T).mean()
    loss.backward()
    return draft.model.embed_tokens.weight.grad, loss.item()


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_of_head_rows_is_that_of_indexing_inside_the_graph(
    tied: bool, t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    shortlist = torch.arange(0, 512, 2)
    module = make_module(t_tied, Distill(outside_rows=64), small_draft(tied), shortlist=shortlist)
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    window = [dataset.collate([0, 1]), dataset.collate([2])]
    rows = module.rows(window)
    assert 256 < len(rows.ids) < 512

    def losses(weight: torch.Tensor) -> torch.Tensor:
        return sum(((module.hidden(batch) @ weight.T).square().mean() for batch in window), torch.zeros(()))

    losses(module.table[rows.ids]).backward()
    expected = {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}
    module.zero_grad()
    weight, teacher = module._head(rows)
    assert torch.equal(teacher, t_tied.lm_head.weight[rows.ids])
    losses(weight).backward()
    assert weight.grad is not None
    add_gradient(module.table, rows.ids, weight.grad)
    found = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [[[0], [1]], [[0, 1]], [[2, 0], [1], [3]]])
def test_t43_denominator_is_the_whole_window(
    cut: list[list[int]], t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    """Rows of 3 and of 20 answer tokens: each token counts once, however they are cut into micro-batches."""
    window = [dataset.collate(rows) for rows in cut]
    module, kept = make_module(t_tied, Distill(grad_clip=0.0)), []
    whole = dataset.collate([row for rows in cut for row in rows])
    expected, loss = reference_gradient(module, whole, t_tied)
    module.configure_optimizers = lambda: Recorder(module, kept)  # type: ignore[assignment, method-assign]
    run(module, [window])
    torch.testing.assert_close(kept[0], expected, rtol=1e-4, atol=1e-5)
    assert module.taken["loss"] == pytest.approx(loss, rel=1e-5)
    assert module.taken["num_tok"] == len(whole.labels)


class Recorder(torch.optim.SGD):
    """An optimizer that moves nothing and keeps the table's gradient."""

    def __init__(self, module: DraftModule, kept: list[torch.Tensor]) -> None:
        super().__init__(module.parameters(), lr=0.0)
        self.module, self.kept = module, kept

    def step(self, closure=None) -> None:  # type: ignore[no-untyped-def, override]
        if closure is not None:
            closure()
        self.kept.append(self.module.table.grad.clone())


def test_padding_changes_nothing(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    module = make_module(t_tied, Distill())
    alone = torch.cat([module.hidden(dataset.collate([row])) for row in range(4)])
    torch.testing.assert_close(module.hidden(dataset.collate(range(4))), alone, rtol=1e-4, atol=1e-5)


def test_t28_weights_are_float32_and_move(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    draft = small_draft().to(torch.bfloat16)
    module = make_module(t_tied, Distill(lr=1e-5, warmup_steps=0), draft)
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    run(module, [[dataset.collate(range(8))]] * 20, "bf16-mixed")
    changed = sum(int((value != before[name]).sum()) for name, value in module.named_parameters())
    assert changed > 0.95 * sum(value.numel() for value in before.values())
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}


def test_the_pad_token_is_trained_as_input(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    """Where padding and end of text share an id, its embedding must move."""
    batch = dataset.collate([1])
    batch.input_ids[0, 3] = 2
    module = make_module(t_tied, Distill(outside_rows=0), small_draft(tied=False))
    before = module.draft.get_input_embeddings().weight[2].clone()
    run(module, [[batch]])
    assert not torch.equal(module.draft.get_input_embeddings().weight[2], before)


def test_t45_a_checkpoint_holds_no_teacher(t_tied: PreTrainedModel, dataset: ResponseDataset, tmp_path: Path) -> None:
    module = make_module(t_tied, Distill(), shortlist=torch.arange(256))
    trainer = run(module, [[dataset.collate([0, 1])]])
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    state = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert all(name.startswith("draft.") or name == "shortlist" for name in state["state_dict"])
    weights = sum(value.numel() * 4 for value in module.parameters())
    assert (tmp_path / "c.ckpt").stat().st_size < 1.05 * 3 * weights + 50_000  # weights and AdamW's two moments
    again = make_module(make_target(seed=9), Distill(), shortlist=torch.arange(256))
    again.load_state_dict(state["state_dict"], strict=True)


def test_a_loss_that_is_not_finite_stops_the_run(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    module = make_module(t_tied, Distill())
    batch = dataset.collate([0])
    batch.hidden_target[0, 0] = float("nan")
    with pytest.raises(TrainingDiverged, match=r"step 1.*distill\.lr"):
        run(module, [[batch]])


def test_dropout_is_a_function_of_the_step(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    """So a resumed run needs the state of no generator, in no process."""
    losses = []
    for dropped in (0.5, 0.5, 0.0):
        torch.manual_seed(len(losses))
        draft = small_draft()
        draft.config.attention_dropout = dropped
        for layer in draft.model.layers:
            layer.self_attn.attention_dropout = dropped
        module = make_module(t_tied, Distill(lr=1e-9), draft)
        run(module, [[dataset.collate([0])]] * 2)
        losses.append(module.taken["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    stage = Distill(lr=1.0, min_lr_frac=0.1, warmup_steps=4, max_steps=24)
    rates = [learning_rate(step, stage) for step in range(24)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[14] == pytest.approx(0.55)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(24, stage) == pytest.approx(0.1)


def test_norms_are_not_decayed(t_tied: PreTrainedModel) -> None:
    module = make_module(t_tied, Distill(weight_decay=0.1))
    groups = module.configure_optimizers().param_groups  # type: ignore[union-attr]
    decay = {id(value): group["weight_decay"] for group in groups for value in group["params"]}
    for name, value in module.named_parameters():
        assert decay[id(value)] == (0.0 if "norm" in name or name.endswith("bias") else 0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_and_adamw_the_tables(tied: bool, t_tied: PreTrainedModel) -> None:
    module = make_module(t_tied, Distill(optimizer="muon"), small_draft(tied))
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    muon = {id(value) for group in optimizer.param_groups if "momentum" in group for value in group["params"]}
    every = [id(value) for group in optimizer.param_groups for value in group["params"]]
    assert sorted(every) == sorted(id(value) for value in module.parameters())
    for name, value in module.named_parameters():
        assert (id(value) in muon) == ("layers" in name and value.dim() == 2), name


def test_a_live_target_and_cached_states_give_one_gradient(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    window, kept = [dataset.collate([0, 1]), dataset.collate([5])], {}
    for name, live in (("hidden", None), ("live", copy.deepcopy(t_tied))):
        module = make_module(t_tied, Distill(grad_clip=0.0), live=live)
        kept[name] = []
        module.configure_optimizers = lambda: Recorder(module, kept[name])  # type: ignore[assignment, method-assign]  # noqa: B023
        run(module, [window])
        assert not any("live" in key or "frozen" in key for key in module.state_dict())
    # The cached states are bf16.
    difference = (kept["live"][0] - kept["hidden"][0]).norm() / kept["hidden"][0].norm()
    assert 0 < difference < 0.01


def test_a_reference_selects_the_positions_and_the_denominator(
    t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    """Half of each micro-batch, by the gap to the reference; each kept token counts once over the window."""
    window, reference = [dataset.collate([0, 1]), dataset.collate([5, 6])], make_target(make_config(layers=2), seed=8)
    stage, kept = Distill(reference="somewhere", select_frac=0.5, grad_clip=0.0), []
    module = make_module(t_tied, stage, reference=reference)
    plain, head = copy.deepcopy(module.draft), t_tied.get_output_embeddings().weight.detach()
    total, count = torch.zeros(()), 0
    for batch in window:
        at = batch.positions[:, 0], batch.positions[:, 1]
        target = batch.hidden_target.float() @ head.T
        ours = divergence("forward_kl", target, plain(batch.input_ids).logits[at])
        with torch.no_grad():
            theirs = divergence("forward_kl", target, reference(batch.input_ids).logits[at])
        best = (ours - theirs).detach().argsort(descending=True)[: -(-len(ours) // 2)]
        total, count = total + ours[best].sum(), count + len(best)
    (total / count).backward()
    module.configure_optimizers = lambda: Recorder(module, kept)  # type: ignore[assignment, method-assign]
    run(module, [window])
    torch.testing.assert_close(kept[0], plain.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-5)
    assert module.taken["loss"] == pytest.approx(total.item() / count, rel=1e-5)
    assert module.taken["num_trained"] == count < module.taken["num_tok"] == sum(len(b.labels) for b in window)


def test_survival_weights_know_where_answers_begin(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    batch = dataset.collate([0, 3, 5])
    assert batch.place.tolist() == [*range(3), *range(11), *range(1)]
    module = make_module(t_tied, Distill(survival_k=4))
    run(module, [[batch]])
    plain = make_module(t_tied, Distill())
    run(plain, [[batch]])
    assert 0.25 * plain.taken["loss"] <= module.taken["loss"] < plain.taken["loss"]


def test_t20_dropped_rows_leave_finite_weights(t_tied: PreTrainedModel, tmp_path: Path) -> None:
    """An empty answer, a prompt that fills the row, and a normal one."""
    data = ResponseDataset(write_answers(tmp_path / "a", t_tied, [(8, 0), (64, 5), (9, 4)]), max_length=64)
    assert len(data) == 1 and sum(data.num_dropped.values()) == 2
    module = make_module(t_tied, Distill())
    run(module, [[data.collate([0])]] * 3)
    assert all(torch.isfinite(value).all() for value in module.parameters())
    assert module.taken["num_tok"] == 4


def test_low_rank_head_is_folded_on_export(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    draft = small_draft()
    factors = low_rank_factors(draft.get_output_embeddings().weight, 16)
    module = make_module(t_tied, Distill(), draft, factors=factors)
    run(module, [[dataset.collate(range(4))]] * 2)
    assert not torch.equal(module.left, factors[0])
    model, exported = module.export()
    assert exported is not None
    batch = dataset.collate([1])
    logits = model(batch.input_ids).logits[batch.positions[:, 0], batch.positions[:, 1]]
    torch.testing.assert_close(logits, module.hidden(batch) @ module.left.T, rtol=1e-4, atol=1e-3)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert not model.config.tie_word_embeddings


def test_full_rank_factors_are_the_head_itself(t_tied: PreTrainedModel) -> None:
    head = t_tied.get_output_embeddings().weight
    left, right = low_rank_factors(head, 64)
    torch.testing.assert_close(left @ right, head, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"1\.\.64"):
        low_rank_factors(head, 65)
