"""The on-policy stage: what is kept of a verify pass, rows with branches, the denominator, and a run that resumes."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from distill import replay
from distill.branches import PAD, Branch, Layout, Refused, branch_length, lay_out
from distill.checkpoint import read_draft
from distill.fit import checkpoint_step
from distill.look import look
from distill.recipe import RecipeError, load_recipe
from distill.replay import ReplayDataset, drawn_prompts
from distill.runs import Interrupted, Stop
from distill.schema import Distill
from distill.shards import load_rows, read_manifest
from distill.teacher import Batch
from distill.train import main
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from tests.conftest import make_config, make_noisy, make_target
from tests.distill.test_module import Recorder, make_module, run
from tests.distill.test_train import newest, train_rows, write_world

REPLAY = "distill.replay={frac: 0.4, num_prompts: 10, k: 3}"
PROMPTS = [(5, 6, 7, 8), (9, 10), (40, 41, 42, 43, 44, 45, 46), (100, 7, 100, 7, 100), (11, 12, 13)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def done(world: Path) -> Path:
    """A finished run: steps 7 to 10 are the stage's."""
    assert main([str(world / "recipe.yaml"), REPLAY, "responses.shard_rows=4", "responses.batch_size=3"]) == 0
    return newest(world)


def states_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0]


def decode(target: PreTrainedModel, draft: PreTrainedModel, eos: list[int], temperature: float, k: int = 4):  # type: ignore[no-untyped-def]
    """Every answer with its branches; three rows at a time, so that rows come and go."""
    model, small = copy.deepcopy(target), copy.deepcopy(draft)
    refused = Refused(eos)
    drafter = ModelDrafter(Runner(small, 3, 64), 1)
    decoder = Decoder(Runner(model, 3, 64), eos, drafter, k, 1, keep_hidden=True, watch=refused)
    requests = [Request(str(n), ids, 17 + n, temperature) for n, ids in enumerate(PROMPTS)]
    return [(answer, refused.take(answer.request.id)) for answer in decoder.run(requests)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_kept_are_those_of_a_plain_pass_over_the_drafted_text(
    temperature: float, t_tied: PreTrainedModel, d_noise: PreTrainedModel
) -> None:
    """Answer and every branch against a forward pass of the plain target over exactly that text."""
    seen = 0
    for answer, branches in decode(t_tied, d_noise, [1, 4], temperature):
        ids = [*answer.request.ids, *answer.tokens]
        prompt = len(answer.request.ids)
        torch.testing.assert_close(
            torch.stack(answer.hidden), states_of(t_tied, ids[:-1])[prompt - 1 :], atol=1e-4, rtol=1e-4
        )
        refusals = [c for c in answer.cycles if c.accepted < c.proposed and not c.cut]
        assert len(branches) <= len(refusals)
        for branch, states in branches:
            assert 1 <= branch.after < len(answer.tokens)
            assert len(branch.ids) == len(branch.best) == len(states)
            text = [*ids[: prompt + branch.after], *branch.ids]
            wanted = states_of(t_tied, text)[-len(branch.ids) :]
            torch.testing.assert_close(states, wanted, atol=1e-4, rtol=1e-4)
            assert branch.best == (wanted @ t_tied.lm_head.weight.T).argmax(-1).tolist()
            if temperature == 0:  # the first one is what the target did not write
                assert branch.ids[0] != ids[prompt + branch.after]
            assert not {1, 4} & set(branch.ids)
            seen += len(branch.ids)
    assert seen > 20


def test_every_refused_proposal_is_kept_once(t_tied: PreTrainedModel, d_noise: PreTrainedModel) -> None:
    """Without ends of text, the branches hold proposed - accepted tokens of every cycle, and the answer the rest."""
    for answer, branches in decode(t_tied, d_noise, [], 0.0):
        counted = [c.proposed - c.accepted for c in answer.cycles if c.accepted < c.proposed]
        assert [len(branch.ids) for branch, _ in branches] == counted
        assert len(answer.hidden) == len(answer.tokens)
        after, places = 1, []
        for cycle in answer.cycles:
            if cycle.accepted < cycle.proposed:
                places.append(after + cycle.accepted)
            after += cycle.emitted
        assert [branch.after for branch, _ in branches] == places


def test_a_draft_that_is_the_target_leaves_no_branch(t_tied: PreTrainedModel, d_same: PreTrainedModel) -> None:
    assert all(not branches for _, branches in decode(t_tied, d_same, [], 0.0))


def test_watching_changes_no_answer(t_tied: PreTrainedModel, d_noise: PreTrainedModel) -> None:
    drafter = ModelDrafter(Runner(copy.deepcopy(d_noise), 3, 64), 1)
    decoder = Decoder(Runner(copy.deepcopy(t_tied), 3, 64), [1, 4], drafter, 4, 1)
    requests = [Request(str(n), ids, 17 + n, 1.0) for n, ids in enumerate(PROMPTS)]
    plain = {answer.request.id: answer.tokens for answer in decoder.run(requests)}
    assert plain == {answer.request.id: answer.tokens for answer, _ in decode(t_tied, d_noise, [1, 4], 1.0)}


@pytest.mark.parametrize(
    ("proposed", "accepted", "num"),
    [([7, 8, 9], 0, 3), ([7, 8, 9], 2, 1), ([7, 8, 9], 3, 0), ([7, 4, 9], 0, 1), ([4, 8, 9], 0, 0), ([7, 4, 9], 2, 0)]
    + [([], 0, 0)],
)
def test_nothing_is_kept_behind_an_end_of_text(proposed: list[int], accepted: int, num: int) -> None:
    assert branch_length(proposed, accepted, frozenset({4})) == num


def test_the_layout_of_the_worked_example() -> None:
    layout = lay_out(5, 2, [Branch(1, [30, 31], [0, 0]), Branch(2, [40], [0])])
    assert layout.tolist() == [[0, 1, 2, 3, 4, 3, 4, 4], [0, 0, 0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 2, 2, 3]]
    short = lay_out(3, 2, [])
    both = Layout.side_by_side([layout, short], 8)
    assert both.branch[1].tolist() == [0] * 3 + [PAD] * 5
    seen = both.sees()[:, 0]
    assert [seen[0, at].nonzero().flatten().tolist() for at in (4, 5, 6, 7)] == [
        *([0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 5, 6], [0, 1, 2, 3, 7]),
    ]
    assert torch.equal(seen[1, :3, :3], torch.ones(3, 3, dtype=torch.bool).tril())
    assert torch.equal(seen[1, 3:], torch.eye(8, dtype=torch.bool)[3:])
    assert both.sees(2)[0, 0, 6].nonzero().flatten().tolist() == [5, 6]


def branched(rows: list[tuple[list[int], int, list[Branch]]]) -> Batch:
    """A batch of (text, prompt tokens, branches), every position from the prompt's last on supervised."""
    parts = [lay_out(len(text), prompt, branches) for text, prompt, branches in rows]
    layout = Layout.side_by_side(parts, max(part.shape[1] for part in parts))
    ids = torch.zeros(layout.position.shape, dtype=torch.long)
    positions = []
    for number, (text, prompt, branches) in enumerate(rows):
        row = text + [token for branch in branches for token in branch.ids]
        ids[number, : len(row)] = torch.tensor(row)
        column = torch.arange(prompt - 1, len(row))
        positions.append(torch.stack([torch.full_like(column, number), column], 1))
    where = torch.cat(positions)
    return Batch(ids, where, torch.zeros(len(where), dtype=torch.long), torch.empty(0), (), layout=layout)


def small(kind: str) -> PreTrainedModel:
    """A tiny draft; those of gemma2 and mistral have layers that see six positions."""
    if kind == "qwen2":
        return make_target(make_config(layers=2), seed=3)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6}
    torch.manual_seed(0)
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**shape)).eval()
    return Gemma2ForCausalLM(Gemma2Config(**shape, query_pre_attn_scalar=16)).eval()


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "mistral"])
def test_one_pass_over_branches_is_one_over_each_branched_text(kind: str, t_tied: PreTrainedModel) -> None:
    rows = [
        (list(range(20, 32)), 3, [Branch(1, [90, 91], [0, 0]), Branch(4, [92, 93, 94], [0] * 3), Branch(4, [95], [0])]),
        (list(range(50, 57)), 5, [Branch(2, [96], [0])]),
    ]
    draft = small(kind)
    module = make_module(t_tied, Distill(), draft)
    with torch.no_grad():
        found = module.hidden(branched(rows))
    wanted = []
    for text, prompt, branches in rows:
        wanted.append(states_of(draft, text)[prompt - 1 :])
        for branch in branches:
            wanted.append(states_of(draft, [*text[: prompt + branch.after], *branch.ids])[-len(branch.ids) :])
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-5, rtol=1e-4)


def test_the_run_folder_holds_the_stage_and_what_it_trained_on(done: Path, world: Path) -> None:
    manifest = read_manifest(done / "replay")
    assert manifest["complete"]
    assert manifest["answered"] == 10
    settings = manifest["settings"]
    assert (settings["draft_step"], settings["draft_k"], settings["temperatures"]) == (6, 3, [0.0])
    assert [shard["rows"] for shard in manifest["shards"]] == [4, 4, 2]
    rows = load_rows(done / "replay")
    assert [row.shard for row in rows] == [0] * 4 + [1] * 4 + [2] * 2
    trained = {prompt.id for prompt in drawn_prompts(load_recipe(done / "recipe.json"), 10)}
    assert {row.id for row in rows} == trained
    assert [row["step"] for row in train_rows(done) if "loss" in row] == list(range(1, 11))
    dataset = ReplayDataset(done / "replay", 80)
    assert dataset.num_refused == sum(row.num_states - len(row.answer_ids) for row in rows) > 0
    assert sum(dataset.num_supervised) == sum(shard["tokens"] for shard in manifest["shards"])
    assert read_draft(done / "draft").meta["replay"] == {
        **{"step": 6, "k": 3, "temperature": 0.0, "num_prompts": 10},
        **{"num_tok": sum(dataset.num_supervised), "num_refused": dataset.num_refused},
    }


def test_the_states_of_a_row_are_the_targets_at_its_own_positions(done: Path) -> None:
    """Ids, positions, labels and states together: the target over each row, at the supervised positions."""
    dataset, target = ReplayDataset(done / "replay", 80), make_target()
    batch = dataset.collate(range(len(dataset)))
    assert batch.layout is not None
    target.set_attn_implementation("sdpa")
    with torch.no_grad():
        states = target.model(batch.input_ids, **batch.layout.arguments(target.config)).last_hidden_state
    found = states[batch.positions[:, 0], batch.positions[:, 1]]
    torch.testing.assert_close(found, batch.hidden_target.float(), atol=0.02, rtol=0.01)  # stored as bf16
    greedy = (found @ target.lm_head.weight.T).argmax(-1)
    assert (greedy == batch.labels).float().mean() > 0.99
    assert len(batch.labels) == sum(dataset.num_supervised)


def test_cut_rows_keep_the_branches_that_leave_from_what_is_left(done: Path) -> None:
    whole = ReplayDataset(done / "replay", 80)
    longest = max(len(row.prompt_ids) for row in whole.rows)
    short = ReplayDataset(done / "replay", longest + 5)
    assert sum(short.num_supervised) < sum(whole.num_supervised)
    for index, row in enumerate(short.rows):
        kept = min(len(row.answer_ids), longest + 5 - len(row.prompt_ids))
        branches = [Branch(*b) for b in row.branches if b[0] < kept]
        example = short[index]
        assert len(example.labels) == kept + sum(len(b.ids) for b in branches) == short.num_supervised[index]
        assert len(example.input_ids) == short.lengths[index]
        assert len(example.hidden_target) == len(example.labels)
    assert short.collate([0, 1]).layout is not None


def test_a_live_target_is_not_asked_for_what_verification_computed(done: Path, t_tied: PreTrainedModel) -> None:
    batch = ReplayDataset(done / "replay", 64).collate([0, 1])
    module = make_module(t_tied, Distill(), live=make_target(seed=9))
    assert batch.verified and module.target(batch) is batch.hidden_target


def test_the_denominator_counts_answer_and_branches(done: Path, t_tied: PreTrainedModel) -> None:
    """Cut into micro-batches or not, every position has weight 1 / (all of them): the same gradient."""
    dataset = ReplayDataset(done / "replay", 80)
    grads, taken = [], []
    for cut in ([[0, 1, 2]], [[0], [1, 2]]):
        module, kept = make_module(t_tied, Distill(grad_clip=0.0)), []
        module.configure_optimizers = lambda m=module, k=kept: Recorder(m, k)  # type: ignore[assignment, method-assign]
        run(module, [[dataset.collate(rows) for rows in cut]])
        grads.append(kept[0])
        taken.append(module.taken)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)
    assert taken[0]["num_tok"] == taken[1]["num_tok"] == sum(dataset.num_supervised[:3])
    assert taken[0]["loss"] == pytest.approx(taken[1]["loss"], rel=1e-5)


def test_the_loss_on_proposals_falls(done: Path, t_tied: PreTrainedModel) -> None:
    dataset = ReplayDataset(done / "replay", 80)
    batch = dataset.collate(range(len(dataset)))
    module = make_module(t_tied, Distill(lr=3e-3, warmup_steps=1, max_steps=30), make_noisy(make_target(), 0.3))
    losses = []
    for windows in ([[batch]], [[batch]] * 29):
        run(module, windows)
        losses.append(module.taken["loss"])
    assert losses[1] < 0.6 * losses[0]


@pytest.mark.parametrize("when", ["before", "writing", "after"])
def test_a_resumed_run_is_the_same_run(
    when: str, done: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the stage, between two of its shards, and in its steps: files and weights bit for bit."""
    arguments = [str(world / "recipe.yaml"), REPLAY, "responses.shard_rows=4", "responses.batch_size=3"]
    if when == "writing":
        answer, seen = replay._answer, [0]

        def stopped(*given):  # type: ignore[no-untyped-def]
            for found in answer(*given):
                if seen[0] == 6:
                    raise Interrupted(15)
                seen[0] += 1
                yield found

        monkeypatch.setattr(replay, "_answer", stopped)
    else:
        # Checks: one after each step, and one between the two parts. The step after the signal is finished and saved.
        at, checks, raised = {"before": 2, "after": 8}[when], [0], Stop.check

        def check(self: Stop, found: int | None = None) -> None:
            raised(self, found)
            checks[0] += 1
            if checks[0] == at:
                self.signum = 15

        monkeypatch.setattr(Stop, "check", check)
    assert main([*arguments, f"output_dir={tmp_path}/runs", "track.mode=disabled"]) == 143
    monkeypatch.undo()
    folder = newest(tmp_path)
    assert checkpoint_step(folder / "checkpoints" / "last.ckpt") == {"before": 3, "writing": 6, "after": 8}[when]
    assert main(["--resume", str(folder)]) == 0
    for name in sorted(path.name for path in (done / "replay").iterdir()):
        assert (folder / "replay" / name).read_bytes() == (done / "replay" / name).read_bytes(), name
    mine, theirs = (torch.load(f / "checkpoints" / "last.ckpt", weights_only=True) for f in (folder, done))
    assert mine["global_step"] == theirs["global_step"] == 10
    for name, value in theirs["state_dict"].items():
        assert torch.equal(mine["state_dict"][name], value), name
    losses = [{row["step"]: row["loss"] for row in train_rows(f) if "loss" in row} for f in (folder, done)]
    assert losses[0] == losses[1]


def test_a_run_whose_proposals_are_gone_says_so(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tmp_path / "runs" / "tiny" / done.name
    shutil.copytree(done, again)
    shutil.rmtree(again / "replay")
    assert main(["--resume", str(again), "distill.max_steps=12", "track.mode=disabled"]) == 2
    assert "is gone or incomplete, and the run is at step 10" in capsys.readouterr().err


def test_more_steps_keep_the_stages_start(done: Path, tmp_path: Path) -> None:
    again = tmp_path / "runs" / "tiny" / done.name
    shutil.copytree(done, again)
    assert main(["--resume", str(again), "distill.max_steps=12", "track.mode=disabled"]) == 0
    assert read_manifest(again / "replay") == read_manifest(done / "replay")
    assert [row["step"] for row in train_rows(again) if "loss" in row] == list(range(1, 13))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distill.survival_k=3"], "distill.survival_k = 3 weighs whole answers"),
        (["distill.packing=true"], "distill.packing = true puts answers where replay puts"),
        (["trainer.devices=2"], "trainer.devices = 2: distill.replay runs in one process"),
        (["distill.replay.frac=0.9"], "distill.replay.frac = 0.9 starts after step 1, but warm-up"),
        (["distill.replay.frac=1.0"], "distill.replay.frac"),
        (["distill.replay.num_prompts=0"], "distill.replay.num_prompts"),
        (["distill.replay.pick=1"], "distill.replay.pick"),
    ],
)
def test_what_does_not_go_with_the_stage_is_refused(world: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(world / "recipe.yaml", [REPLAY, *overrides])
    assert message in str(caught.value)


def test_check_tells_what_the_stage_takes(world: Path) -> None:
    text = "\n".join(look(load_recipe(world / "recipe.yaml", [REPLAY]), "recipe.yaml"))
    # 10 prompts x 12 tokens x 4 positions a cycle, 64 numbers of two bytes each
    assert "replay: the last 4 of 10 steps, on proposals to 10 prompts: at most 0.00 M verified positions" in text
    assert "0.06 MB of hidden states on disk" in text
    assert "proposals" not in "\n".join(look(load_recipe(world / "recipe.yaml"), "recipe.yaml"))


def test_the_stage_is_off_unless_asked_for(world: Path) -> None:
    assert load_recipe(world / "recipe.yaml").distill.replay is None
