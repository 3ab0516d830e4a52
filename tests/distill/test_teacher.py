"""Cached answers as batches: what is supervised, with which target state, in which order."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from distill.loss_reference import divergence
from distill.losses import chunked_loss
from distill.prompt import Prompt
from distill.recipe import Responses
from distill.responses import write_responses
from distill.shards import FORMAT
from distill.teacher import Batch, ResponseDataset, TeacherError
from distill.teacher_topk import write_topk
from tests.conftest import CHATML, make_target, make_tokenizer


def write_folder(
    folder: Path, answers: list[tuple[int, int]], target: PreTrainedModel | None = None, shard_rows: int = 4
) -> Path:
    """A responses folder with rows of (prompt tokens, answer tokens), as `distill.responses` writes it.

    With a target the ids are random and the states are the target's own; without, ids count up and state j of a row is
    [its first answer id, j].
    """
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(11)
    shards = []
    for number, start in enumerate(range(0, len(answers), shard_rows)):
        lines, states = [], []
        for index, (prompt, answer) in enumerate(answers[start : start + shard_rows], start):
            if target is None:
                ids = list(range(100 * index, 100 * index + prompt + answer))
                hidden = torch.tensor([[ids[prompt] if answer else 0, j] for j in range(answer)]).float().reshape(-1, 2)
            else:
                ids = torch.randint(5, 500, (prompt + answer,), generator=generator).tolist()
                with torch.no_grad():
                    hidden = target.model(torch.tensor([ids])).last_hidden_state[0, prompt - 1 : -1]
            states.append(hidden)
            row = {
                "id": f"row-{index}",
                "domain": ("code", "math")[index % 2],
                "prompt_ids": ids[:prompt],
                "answer_ids": ids[prompt:],
                "temperature": 0.0,
                "finish": "eos",
                "reference": False,
            }
            lines.append(json.dumps(row) + "\n")
        (folder / f"rows-{number:05d}.jsonl").write_text("".join(lines))
        save_file({"hidden": torch.cat(states).bfloat16()}, folder / f"hidden-{number:05d}.safetensors")
        tokens = sum(a for _, a in answers[start : start + shard_rows])
        shards.append({"shard": number, "rows": len(lines), "tokens": tokens})
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "settings": {}, "shards": shards}))
    return folder


def test_supervised_positions_labels_and_states_belong_together(tmp_path):
    data = ResponseDataset(write_folder(tmp_path, [(3, 4), (5, 1), (2, 6), (4, 3), (1, 2)]), max_length=100)
    batch = data.collate([4, 0, 1])
    assert batch.rows == (4, 0, 1)
    # The last answer token predicts nothing supervised, so inputs are one shorter than prompt + answer.
    assert batch.input_ids.shape == (3, 16)  # widths are multiples of 16, so that shapes come again
    assert batch.input_ids[:, :6].tolist() == [
        [400, 401, 0, 0, 0, 0],
        [0, 1, 2, 3, 4, 5],
        [100, 101, 102, 103, 104, 0],
    ]
    assert not batch.input_ids[:, 6:].any()
    assert batch.positions.tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [1, 4], [1, 5], [2, 4]]
    assert batch.labels.tolist() == [401, 402, 3, 4, 5, 6, 105]
    inputs = batch.input_ids[batch.positions[:, 0], batch.positions[:, 1]]
    assert (inputs + 1).tolist() == batch.labels.tolist()
    # 401 and 105 are above 256: bf16 keeps 8 bits.
    first = torch.tensor([401, 401, 3, 3, 3, 3, 105]).bfloat16()
    assert torch.equal(batch.hidden_target[:, 0], first)
    assert batch.hidden_target[:, 1].tolist() == [0, 1, 0, 1, 2, 3, 0]
    assert data.lengths == [6, 5, 7, 6, 2]


def test_t20_rows_without_room_for_an_answer_are_dropped_and_counted(tmp_path, caplog):
    with caplog.at_level("INFO"):
        data = ResponseDataset(write_folder(tmp_path, [(8, 0), (64, 5), (60, 10), (3, 4)]), max_length=64)
    assert [row.id for row in data.rows] == ["row-2", "row-3"]
    assert data.num_dropped == {"empty": 1, "prompt_too_long": 1}
    assert data.num_cut == 1 and data.num_supervised == [4, 4]
    assert "dropped 1 empty, 1 whose prompt fills max_length 64; 1 cut there" in caplog.text
    batch = data.collate([0, 1])
    assert batch.input_ids.shape == (2, 64)
    assert batch.labels.tolist() == [260, 261, 262, 263, 303, 304, 305, 306]
    assert len(batch.labels) == len(batch.hidden_target) == len(batch.positions) == 8


def test_nothing_left_is_an_error(tmp_path):
    folder = write_folder(tmp_path, [(64, 5), (8, 0)])
    with pytest.raises(TeacherError, match=r"no answer to train on .*max_length 64"):
        ResponseDataset(folder, max_length=64)
    with pytest.raises(TeacherError, match="max_length 1: must be >= 2"):
        ResponseDataset(folder, max_length=1)


def test_a_cut_or_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path, [(3, 4), (3, 5)])
    path = folder / "hidden-00000.safetensors"
    save_file({"hidden": torch.zeros(6, 2, dtype=torch.bfloat16)}, path)
    data = ResponseDataset(folder, max_length=64)
    assert len(data[0].labels) == 4
    with pytest.raises(TeacherError, match=r"hidden-00000.safetensors: 6 hidden states, but row 'row-1'"):
        data[1]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TeacherError, match="hidden-00000"):
        ResponseDataset(folder, max_length=64)[0]
    path.unlink()
    with pytest.raises(TeacherError, match="hidden-00000"):
        ResponseDataset(folder, max_length=64)[0]


def test_states_are_mapped_and_a_worker_maps_its_own(tmp_path):
    data = ResponseDataset(write_folder(tmp_path, [(3, 4)] * 6), max_length=64)
    expected = data.collate(range(6))
    copy = pickle.loads(pickle.dumps(data))
    assert not copy._hidden
    assert torch.equal(copy.collate(range(6)).hidden_target, expected.hidden_target)


def test_t21_rows_side_by_side_are_as_good_as_alone(tmp_path, t_tied):
    """Without packing: right padding is never looked at, so a batch's loss is the sum of its rows' losses."""
    data = ResponseDataset(write_folder(tmp_path, [(1, 3), (4, 5), (2, 9)], t_tied), max_length=64)
    head = t_tied.lm_head.weight.detach()

    def loss(rows: list[int]) -> float:
        batch = data.collate(rows)
        with torch.no_grad():
            states = t_tied.model(batch.input_ids).last_hidden_state * 1.1
        states = states[batch.positions[:, 0], batch.positions[:, 1]]
        return chunked_loss(states, head, batch.hidden_target, head, batch.labels, {"forward_kl": 1.0}, 1)[0].item()

    assert loss([0, 1, 2]) == pytest.approx(loss([0]) + loss([1]) + loss([2]), abs=1e-4)


def test_t21_the_trials_rows_side_by_side_and_alone(t_tied):
    """[1,2,3] and [4,5,6,7,8], every token supervised: sums of token losses within 1e-5."""
    texts = [torch.arange(1, 4), torch.arange(4, 9)]

    def loss(rows: list[torch.Tensor]) -> float:
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        at = [(number, t) for number, row in enumerate(rows) for t in range(len(row) - 1)]
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        positions = torch.tensor(at)
        batch = Batch(ids, positions, torch.cat([row[1:] for row in rows]), torch.empty(len(at), 0), (0,))
        with torch.no_grad():
            logits = t_tied(batch.input_ids).logits[positions[:, 0], positions[:, 1]]
        return torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum").item()

    alone = loss(texts[:1]) + loss(texts[1:])
    assert loss(texts) == pytest.approx(alone, rel=1e-5)


def test_t07_the_answer_and_its_end_are_supervised_and_nothing_else(tmp_path):
    """Also with a template that writes a think block: what serving writes itself is prompt."""
    think = CHATML.replace("<|im_start|>assistant\n'", "<|im_start|>assistant\n<think>\n</think>\n'")
    for number, template in enumerate((CHATML, think)):
        tokenizer = make_tokenizer(template=template)
        prompt = Prompt("a", "code", ({"role": "user", "content": "Say it"},), "four of them", "test")
        stage = Responses(source="reference", max_new_tok=20)
        write_responses(tmp_path / str(number), make_target(), tokenizer, [prompt], stage, 0, (1,), "sha", 100)
        batch = ResponseDataset(tmp_path / str(number), max_length=200).collate([0])
        answer = tokenizer("four of them", add_special_tokens=False)["input_ids"]
        assert batch.labels.tolist() == [*answer, 1]
        assert ("</think>" in tokenizer.decode(batch.input_ids[0])) == (number == 1)


@pytest.mark.parametrize("k", [3, 512])
def test_top_k_shards_stand_beside_the_states(tmp_path, t_tied, k):
    folder = write_folder(tmp_path, [(3, 4), (5, 1), (2, 6), (4, 3), (1, 2)], t_tied)
    head = t_tied.lm_head.weight.detach()
    write_topk(folder, head, k)
    states, few = ResponseDataset(folder, 64), ResponseDataset(folder, 64, topk=True)
    ours, theirs = few.collate([4, 0, 1]), states.collate([4, 0, 1])
    assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.labels, theirs.labels)
    assert ours.hidden_target.shape == (7, 0) and theirs.topk is None
    log_p = (theirs.hidden_target.float() @ head.T).log_softmax(-1)
    assert ours.topk.ids.shape == (7, k)
    torch.testing.assert_close(ours.topk.log_p[:, :-1], log_p.gather(-1, ours.topk.ids.long()), rtol=1e-4, atol=1e-4)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("topk-*")}
    write_topk(folder, head, k)
    assert len(before) == 2 and {path: path.stat().st_mtime_ns for path in before} == before
    write_topk(folder, head, 2)
    assert ResponseDataset(folder, 64, topk=True)[0].topk.ids.shape == (4, 2)
    with pytest.raises(ValueError, match="teacher_topk = 513"):
        write_topk(folder, head, 513)


def test_cached_states_and_head_are_the_live_target(tmp_path, t_tied):
    """From bf16 states the divergence to the live target is far below any draft's."""
    data = ResponseDataset(write_folder(tmp_path, [(6, 20), (9, 12)], t_tied), max_length=64)
    batch = data.collate([0, 1])
    with torch.no_grad():
        live = t_tied(batch.input_ids).logits[batch.positions[:, 0], batch.positions[:, 1]]
        cached = batch.hidden_target.float() @ t_tied.lm_head.weight.T
    assert divergence("forward_kl", live, cached).max() < 1e-3
    assert (live.argmax(-1) == cached.argmax(-1)).all()
