"""The target's answers: what is written, what the hidden states mean, resumption, loops."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill.recipe import Responses
from distill.responses import loops, write_responses
from distill.shards import ResponsesError, load_rows
from distill.teacher import ResponseDataset
from distill.teacher_topk import write_topk
from distill.tokens import encode_prompt
from distill.traffic import Prompt
from tests.conftest import CHATML, make_target, make_tokenizer

EOS = (1, 4)
DOMAINS = ("code", "qa", "math")


def prompts(num: int = 12) -> list[Prompt]:
    texts = ["add two numbers", "the capital of France", "if a train travels sixty miles"]
    return [
        Prompt(
            f"p{i}",
            ("code", "qa", "math")[i % 3],
            ({"role": "user", "content": f"{texts[i % 3]} {i}"},),
            f"ref {i}",
            "t",
        )
        for i in range(num)
    ]


def write(folder: Path, num: int = 12, source: str = "target", **changes: Any) -> dict[str, Any]:
    stage = Responses(
        **{
            "max_new_tok": 20,
            "batch_size": 4,
            "shard_rows": 5,
            "temperatures": (0.0, 0.9),
            "source": source,
            "loop_repeats": 0,
            **changes,
        }
    )
    return write_responses(folder, make_target(), make_tokenizer(), prompts(num), stage, 3, EOS, "hash", 200)


@pytest.mark.parametrize("source", ["target", "reference"])
def test_hidden_states_predict_the_answers(tmp_path: Path, source: str) -> None:
    """Entry j of a row is the state whose head output gives answer token j (float32 model, bf16 on disk)."""
    manifest = write(tmp_path, source=source)
    assert manifest["complete"] and manifest["answered"] == 12
    assert [s["rows"] for s in manifest["shards"]] == [5, 5, 2]
    plain = make_target()
    head = plain.get_output_embeddings().weight
    rows = load_rows(tmp_path)
    assert {r.id for r in rows} == {f"p{i}" for i in range(12)}
    for row in rows:
        hidden = load_file(tmp_path / f"hidden-{row.shard:05d}.safetensors")["hidden"]
        mine = hidden[row.offset : row.offset + len(row.answer_ids)].float()
        with torch.no_grad():
            ids = torch.tensor([row.prompt_ids + row.answer_ids])
            want = plain.model(ids).last_hidden_state[0, len(row.prompt_ids) - 1 : -1]
        assert torch.allclose(mine, want, atol=0.03, rtol=0.02)
        if source == "target" and row.temperature == 0:
            logits = want @ head.T
            assert logits.argmax(-1).tolist() == row.answer_ids
        assert (row.finish == "eos") == (row.answer_ids[-1] in EOS)
    if source == "target":
        assert {r.temperature for r in rows} == {0.0, 0.9}


def test_a_reference_ends_as_the_template_ends_a_turn(tmp_path: Path) -> None:
    """T08: <|im_end|> (4), not the tokenizer's </s> (1); that one where the template names none."""
    write(tmp_path / "chat", num=3, source="reference")
    assert {row.answer_ids[-1] for row in load_rows(tmp_path / "chat")} == {4}
    stage = Responses(max_new_tok=20, source="reference")
    for template, ends, last in ((None, EOS, 1), (CHATML, (1,), 1), (None, (3, 4), 3)):
        folder = tmp_path / f"{template is None}-{ends}"
        tokenizer = make_tokenizer(template=template)
        write_responses(folder, make_target(), tokenizer, prompts(2), stage, 3, ends, "hash", 200)
        assert {row.answer_ids[-1] for row in load_rows(folder)} == {last}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reference_answers_are_read_on_the_targets_device(tmp_path: Path) -> None:
    stage = Responses(max_new_tok=20, source="reference")
    hidden = {}
    for device in ("cpu", "cuda"):
        folder, target = tmp_path / device, make_target().to(device)
        write_responses(folder, target, make_tokenizer(), prompts(3), stage, 3, EOS, "hash", 200)
        hidden[device] = load_file(folder / "hidden-00000.safetensors")["hidden"].float()
    assert torch.allclose(hidden["cpu"], hidden["cuda"], atol=0.03, rtol=0.02)


def test_a_chat_of_several_turns_is_all_prompt_and_its_last_answer_alone_is_learnt(tmp_path: Path) -> None:
    """The template's own text up to the generation prompt is read; what the target then writes is supervised."""
    turns = [("system", "Be brief."), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages = tuple({"role": role, "content": text} for role, text in [*turns, ("user", "five")])
    tokenizer, stage = make_tokenizer(), Responses(max_new_tok=20, batch_size=2, temperatures=(0.0,), loop_repeats=0)
    chats = [Prompt("chat", "qa", messages, None, "t"), Prompt("short", "qa", messages[-1:], None, "t")]
    write_responses(tmp_path, make_target(), tokenizer, chats, stage, 3, EOS, "hash", 200)
    for row in load_rows(tmp_path):
        given = messages if row.id == "chat" else messages[-1:]
        text = tokenizer.apply_chat_template(list(given), add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(row.prompt_ids) == text
        assert text.count("<|im_end|>") == len(given) and text.endswith("<|im_start|>assistant\n")
    dataset = ResponseDataset(tmp_path, max_length=200)
    batch = dataset.collate([0, 1])
    assert len(batch.labels) == sum(len(row.answer_ids) for row in dataset.rows)
    for number, row in enumerate(dataset.rows):
        own = batch.positions[:, 0] == number
        # The last prompt token predicts the first answer token, the last but one answer token the last.
        first = len(row.prompt_ids) - 1
        assert batch.positions[own, 1].tolist() == list(range(first, first + len(row.answer_ids)))
        assert batch.labels[own].tolist() == row.answer_ids


def test_a_capped_loop_does_not_inflate_what_is_learnt(tmp_path: Path) -> None:
    """Rows that loop are kept up to the cap and counted; with loop_repeats 0 the same prompts run to the limit."""
    target = make_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    total = {}
    for repeats in (4, 0):
        stage = Responses(max_new_tok=100, batch_size=4, temperatures=(0.0,), loop_repeats=repeats)
        folder = tmp_path / str(repeats)
        manifest = write_responses(folder, target, make_tokenizer(), prompts(6), stage, 0, (1,), "hash", 200)
        total[repeats] = sum(len(row.answer_ids) for row in load_rows(folder))
        assert sum(shard["looped"] for shard in manifest["shards"]) == (6 if repeats else 0)
        assert sum(shard["truncated"] for shard in manifest["shards"]) == (0 if repeats else 6)
    assert total[4] <= 6 * 25 < total[0] == 600


def test_an_interrupted_generation_resumes_and_gives_the_same_answers(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(whole)
    write(cut)
    manifest = json.loads((cut / "manifest.json").read_text())
    # As a kill after the first shard leaves it: the manifest names one shard, files of another lie about.
    manifest["shards"], manifest["complete"] = manifest["shards"][:1], False
    (cut / "manifest.json").write_text(json.dumps(manifest))
    again = write(cut)
    assert again["complete"] and again["answered"] == 12
    assert {r.id: r.answer_ids for r in load_rows(cut)} == {r.id: r.answer_ids for r in load_rows(whole)}
    assert len(load_rows(cut)) == 12


@pytest.mark.parametrize("shard_rows", [1, 5])
def test_a_prompt_without_an_answer_is_settled_and_not_asked_again(tmp_path: Path, shard_rows: int) -> None:
    """Three references are empty: counted once, whatever was interrupted; a shard may have no row at all."""
    asked = [replace(one, reference="" if one.id in ("p1", "p5", "p6") else one.reference) for one in prompts()]
    stage = Responses(max_new_tok=20, shard_rows=shard_rows, source="reference")

    def write_all(folder: Path) -> dict[str, Any]:
        return write_responses(folder, make_target(), make_tokenizer(), asked, stage, 3, EOS, "hash", 200)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    manifest = write_all(whole)
    assert manifest["asked"] == 12 and manifest["answered"] == 9 and manifest["dropped"]["empty"] == 3
    skipped = [name for shard in manifest["shards"] for name in shard.get("skipped", {}).get("empty", ())]
    assert sorted(skipped) == ["p1", "p5", "p6"]
    assert len(manifest["shards"]) == -(-12 // shard_rows)
    for left in range(len(manifest["shards"])):
        shutil.copytree(whole, cut)
        short = {**manifest, "shards": manifest["shards"][:left], "complete": False}
        (cut / "manifest.json").write_text(json.dumps(short))
        assert write_all(cut) == manifest
        assert {p.name: p.read_bytes() for p in cut.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
        shutil.rmtree(cut)
    head = make_target().get_output_embeddings().weight
    write_topk(whole, head, 3)
    assert len(ResponseDataset(whole, 200)) == len(ResponseDataset(whole, 200, topk=True)) == 9


def test_rows_lie_in_the_order_of_the_work_whenever_they_finish(tmp_path: Path) -> None:
    """Training meets rows by their place, so a place must not depend on which answer was short."""
    stage, eos = Responses(max_new_tok=20, batch_size=3, temperatures=(0.0, 0.9)), range(0, 512, 9)
    write_responses(tmp_path, make_target(), make_tokenizer(), prompts(), stage, 3, eos, "hash", 200)
    rows = load_rows(tmp_path)
    assert len({len(row.answer_ids) for row in rows}) > 1
    assert [row.id for row in rows] == [
        one.id for one in sorted(prompts(), key=lambda p: len(encode_prompt(make_tokenizer(), p.messages)))
    ]


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*-0*")}
    write(tmp_path)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*-0*")} == before


@pytest.mark.parametrize("change", [{"temperatures": (0.5,)}, {"max_new_tok": 21}, {"top_p": 0.9}])
def test_settings_are_not_mixed(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path)
    with pytest.raises(ResponsesError, match=f"other settings:\n  {next(iter(change))}: "):
        write(tmp_path, **change)


def test_another_batch_size_may_go_on(tmp_path: Path) -> None:
    """How many rows run together is no property of the answers."""
    write(tmp_path)
    assert write(tmp_path, batch_size=2)["answered"] == 12


def test_prompts_that_are_too_long_are_counted_and_nothing_left_is_an_error(tmp_path: Path) -> None:
    stage = Responses(max_new_tok=4, batch_size=4)
    with pytest.raises(ResponsesError, match=r"3 are over 2 tokens \(the lowest of traffic\.max_prompt_tok, "):
        write_responses(tmp_path, make_target(), make_tokenizer(), prompts(3), stage, 0, EOS, "hash", 2)


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "rows-00001.jsonl"
    path.write_text(path.read_text()[:-30])
    with pytest.raises(ResponsesError, match=r"rows-00001\.jsonl:5 is no response row"):
        load_rows(tmp_path)
    write(tmp_path / "again")
    other = tmp_path / "again" / "rows-00001.jsonl"
    other.write_text(other.read_text().replace('"prompt_ids": [', '"prompt_ids": [9', 1))
    with pytest.raises(ResponsesError, match=r"rows-00001\.jsonl is cut or was changed"):
        load_rows(tmp_path / "again")
    path.unlink()
    with pytest.raises(ResponsesError, match=r"rows-00001\.jsonl is missing"):
        load_rows(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "repeats", "found"),
    [
        ([1, 2, 3] * 8, 4, True),
        ([1, 2, 3] * 7 + [1, 2], 4, False),  # 23 tokens of repetition
        ([9] * 23, 4, False),
        ([9] * 24, 4, True),
        (list(range(12)) * 4, 4, True),
        (list(range(12)) * 3, 4, False),
        ([1, 2, 3] * 8, 0, False),
        ([1, 2, 3] * 8 + [4], 4, False),
        ([], 4, False),
    ],
)
def test_loops(tokens: list[int], repeats: int, found: bool) -> None:
    assert loops(tokens, repeats) is found


def test_a_loop_ends_the_answer(tmp_path: Path) -> None:
    """A target that only repeats its last token: each answer stops once that is a loop, and says so."""
    target = make_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    stage = Responses(max_new_tok=100, batch_size=4, temperatures=(0.0,), loop_repeats=4)
    manifest = write_responses(tmp_path, target, make_tokenizer(), prompts(6), stage, 0, (1,), "hash", 200)
    rows = load_rows(tmp_path)
    assert [s["looped"] for s in manifest["shards"]] == [6]
    for row in rows:
        assert row.finish == "loop" and len(row.answer_ids) <= 25
        assert loops(row.answer_ids, 4) and not loops(row.answer_ids[:-1], 4)
