"""Answers from servers: the same as the engine's, whatever dies meanwhile; what can not be verified is dropped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.endpoint import EndpointError
from distill.models import load_model, load_tokenizer
from distill.recipe import Responses
from distill.responses import write_responses
from distill.server_responses import ServersDown
from distill.shards import ResponsesError, load_rows, read_manifest
from distill.traffic import Prompt
from tests.distill.test_responses import prompts
from tests.servers import free_port, make_writer, save, serve

EOS = (1, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target") / "writer")


@pytest.fixture(scope="module")
def target(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(str(folder), "float32"), load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serve(folder) as (address, _):
        yield address


Target = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def write(
    out: Path, target: Target, asked: list[Prompt], servers: tuple[str, ...] = (), **changes: Any
) -> dict[str, Any]:
    settings = {"max_new_tok": 16, "shard_rows": 5, "temperatures": (0.0,), "batch_size": 4, "concurrency": 2}
    stage = Responses(**{**settings, "retries": 1, "server": servers, **changes})
    return write_responses(out, *target, asked, stage, 3, EOS, "hash", 200)


def dead() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_servers_write_what_the_engine_writes(tmp_path: Path, target: Target, url: str) -> None:
    """Greedy, in words of one token each: ids, ends and hidden states are the engine's own; one endpoint is dead."""
    asked = prompts(12)
    write(tmp_path / "engine", target, asked)
    manifest = write(tmp_path / "server", target, asked, (dead(), url))
    ours, theirs = ({row.id: row for row in load_rows(tmp_path / name)} for name in ("engine", "server"))
    assert manifest["complete"] and manifest["answered"] == 12 == len(theirs)
    assert {row.finish for row in theirs.values()} == {"eos", "length"}
    for id_, row in theirs.items():
        assert (row.prompt_ids, row.answer_ids, row.finish) == (
            ours[id_].prompt_ids,
            ours[id_].answer_ids,
            ours[id_].finish,
        )
        assert row.endpoint == url and not row.recut
    assert manifest["settings"]["served_model"].endswith("writer")
    assert sum(shard["endpoints"][url] for shard in manifest["shards"]) == 12
    assert sum(shard["retried"] for shard in manifest["shards"]) >= 1  # what the dead one had taken
    states = [_states(tmp_path / name) for name in ("engine", "server")]
    assert all(torch.allclose(states[0][id_], states[1][id_], atol=0.02, rtol=0.02) for id_ in ours)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_servers_answers_are_read_on_the_targets_device(tmp_path: Path, target: Target, folder: Path, url: str) -> None:
    on_gpu = load_model(str(folder), "float32", "cuda"), target[1]
    for name, model in (("cpu", target), ("cuda", on_gpu)):
        write(tmp_path / name, model, prompts(3), (url,))
    states = [_states(tmp_path / name) for name in ("cpu", "cuda")]
    assert all(torch.allclose(states[0][id_], states[1][id_], atol=0.02, rtol=0.02) for id_ in states[0])


def _states(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    shards = {path.stem[-5:]: load_file(path)["hidden"].float() for path in folder.glob("hidden-*")}
    return {r.id: shards[f"{r.shard:05d}"][r.offset : r.offset + len(r.answer_ids)] for r in load_rows(folder)}


def test_all_dead_keeps_what_was_answered_and_the_run_resumes(tmp_path: Path, folder: Path, target: Target) -> None:
    """The only server stops in the middle; the rest is answered by another, nothing twice."""
    asked = prompts(14)
    with serve(folder) as (url, server), pytest.raises(ServersDown, match=r"(?s)all 1 endpoints .* resume") as raised:

        def progress(answered: int, *_: int) -> None:
            if answered == 3:
                server.kill_server()

        stage = Responses(
            max_new_tok=16, shard_rows=5, temperatures=(0.0,), concurrency=1, retries=1, server=(url,), batch_size=4
        )  # a retry: while it goes down this server may still say 500
        write_responses(tmp_path, *target, asked, stage, 3, EOS, "hash", 200, progress=progress)
    assert url in str(raised.value)
    manifest = read_manifest(tmp_path)
    kept = {row.id: row.answer_ids for row in load_rows(tmp_path)}
    assert 3 <= len(kept) < 14 and not manifest["complete"]
    # Another address, more of it in flight: the model's name pins the answers, not the endpoint.
    with serve(folder) as (url, _):
        manifest = write(tmp_path, target, asked, (url,), concurrency=3)
    rows = load_rows(tmp_path)
    assert manifest["complete"] and sorted(row.id for row in rows) == sorted(p.id for p in asked)
    assert kept.items() <= {row.id: row.answer_ids for row in rows}.items()


def test_another_target_behind_the_same_name_is_told(
    tmp_path: Path, target: Target, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Greedy answers are read by the local target: of its own they are its first choice, of another's they are not."""
    with caplog.at_level("INFO", "distill.served_answers"):
        write(tmp_path / "own", target, prompts(4), (url,))
        assert re.search(r"100\.0% of \d+ greedy tokens .* first choice$", caplog.messages[-1])
        write(tmp_path / "other", (make_writer(target[1], memory=False), target[1]), prompts(4), (url,))
    assert caplog.records[-1].levelname == "WARNING" and "they serve another model" in caplog.messages[-1]


def test_a_finished_folder_needs_no_server(tmp_path: Path, target: Target, url: str) -> None:
    write(tmp_path, target, prompts(3), (url,))
    assert write(tmp_path, target, prompts(3), (dead(),))["answered"] == 3


def test_another_model_or_sampler_is_not_mixed_in(tmp_path: Path, target: Target, url: str) -> None:
    write(tmp_path, target, prompts(3), (url,))
    with pytest.raises(ResponsesError, match="other settings:\n  served_model: "):
        write(tmp_path, target, prompts(3), (url,), server_model="another")
    with pytest.raises(ResponsesError, match="other settings:\n  temperatures: "):
        write(tmp_path, target, prompts(3), (url,), temperatures=(0.5,))
    with pytest.raises(ResponsesError, match="other settings:\n  served_model: "):
        write(tmp_path, target, prompts(3))


def test_no_endpoint_at_all_is_told_before_anything_is_written(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ConnectionError, match="no endpoint answers:\n  http://127"):
        write(tmp_path, target, prompts(3), (dead(), dead()))
    assert not list(tmp_path.iterdir())


def test_a_server_of_another_template_is_given_up(tmp_path: Path, folder: Path, target: Target) -> None:
    """Its prompts have other tokens: their number says so, and no answer of it is taken."""
    other = load_tokenizer(str(folder))
    other.chat_template = str(other.chat_template).replace("assistant", "a")
    with serve(folder) as (url, _), pytest.raises(ServersDown, match="another model or template"):
        write(tmp_path, (target[0], other), prompts(3), (url,), server_model=str(folder))
    assert load_rows(tmp_path) == [] if (tmp_path / "manifest.json").exists() else True


def test_what_a_server_refuses_is_told_in_its_words(tmp_path: Path, target: Target, url: str) -> None:
    with pytest.raises(ServersDown, match=r"HTTP 422: .*top_k"):
        write(tmp_path, target, prompts(3), (url,), top_k=5)


def test_loops_are_cut_where_the_engine_cuts_them(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save(tmp_path_factory.mktemp("target") / "loops", memory=False)
    target = load_model(str(folder), "float32"), load_tokenizer(str(folder))
    settings = {"max_new_tok": 100, "loop_repeats": 2}
    write(tmp_path / "engine", target, prompts(6), **settings)
    with serve(folder) as (url, _):
        manifest = write(tmp_path / "server", target, prompts(6), (url,), **settings)
    ours, theirs = (
        {row.id: (row.answer_ids, row.finish) for row in load_rows(tmp_path / name)} for name in ("engine", "server")
    )
    assert ours == theirs
    assert {finish for _, finish in ours.values()} == {"loop"}
    assert sum(shard["looped"] for shard in manifest["shards"]) == 6


def test_text_in_other_tokens_is_marked(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A target that writes pieces: the same text is cut otherwise by the tokenizer, and the row says so."""
    folder = save(tmp_path_factory.mktemp("target") / "pieces", words=False)
    target = load_model(str(folder), "float32"), load_tokenizer(str(folder))
    write(tmp_path / "engine", target, prompts(8), loop_repeats=0)
    with serve(folder) as (url, _):
        manifest = write(tmp_path / "server", target, prompts(8), (url,), loop_repeats=0)
    rows = load_rows(tmp_path / "server")
    ours = {
        row.id: target[1].decode(row.answer_ids, skip_special_tokens=True) for row in load_rows(tmp_path / "engine")
    }
    assert len(rows) == 8 and any(row.recut for row in rows)
    assert {row.id: target[1].decode(row.answer_ids, skip_special_tokens=True) for row in rows} == ours
    assert sum(shard["recut"] for shard in manifest["shards"]) == sum(row.recut for row in rows)


def test_a_key_comes_from_the_environment_and_is_not_written(
    tmp_path: Path, target: Target, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUR_KEY", raising=False)
    with pytest.raises(EndpointError, match="OUR_KEY holds no key"):
        write(tmp_path, target, prompts(3), (url,), api_key_env="OUR_KEY")
    monkeypatch.setenv("OUR_KEY", "sk-very-secret")
    write(tmp_path, target, prompts(3), (url,), api_key_env="OUR_KEY")
    assert all(b"very-secret" not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_sick_server_costs_no_prompt_when_another_is_well(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, target: Target
) -> None:
    """Two servers of one name; the second one loaded no chat template, so it answers every request with HTTP 500."""
    folder = save(tmp_path_factory.mktemp("target") / "writer")
    template = folder / "chat_template.jinja"
    with serve(folder) as (well, _):
        template.rename(folder / "aside")
        with serve(folder) as (sick, _):
            manifest = write(tmp_path / "both", target, prompts(10), (sick, well), retries=2)
            with pytest.raises(ServersDown, match=f"{sick}: HTTP 500"):
                write(tmp_path / "sick", target, prompts(3), (sick,), retries=0)
    assert manifest["answered"] == 10 and {row.endpoint for row in load_rows(tmp_path / "both")} == {well}


@pytest.mark.slow
def test_a_killed_writer_loses_and_doubles_nothing(tmp_path: Path, folder: Path, target: Target, url: str) -> None:
    """SIGKILL after the first shard is named, then a resumption: every prompt once, as in a run that nobody killed."""
    out, asked = tmp_path / "out", prompts(20)
    code = (
        "import sys; from pathlib import Path; from tests.distill.test_server_responses import *\n"
        "folder = Path(sys.argv[1]); target = load_model(str(folder), 'float32'), load_tokenizer(str(folder))\n"
        "write(Path(sys.argv[2]), target, prompts(20), (sys.argv[3],), concurrency=1, shard_rows=3)\n"
    )
    words = [sys.executable, "-c", code, str(folder), str(out), url]
    with subprocess.Popen(words, cwd=Path(__file__).parents[2]) as writer:
        while writer.poll() is None and not (out / "manifest.json").exists():
            time.sleep(0.005)
        writer.kill()
    assert writer.returncode == -signal.SIGKILL
    kept = {row.id: row.answer_ids for row in load_rows(out)}
    assert 3 <= len(kept) < 20
    manifest = write(out, target, asked, (url,), shard_rows=3)
    write(tmp_path / "whole", target, asked, (url,), shard_rows=3)
    rows = load_rows(out)
    assert manifest["complete"] and len(rows) == 20
    assert {r.id: r.answer_ids for r in rows} == {r.id: r.answer_ids for r in load_rows(tmp_path / "whole")}
    assert kept.items() <= {r.id: r.answer_ids for r in rows}.items()
