"""The held-out traffic against transformers' own server: rows, cells, files; errors are rows; no acceptance is n/a."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch

from distill.models import load_config, load_model, load_tokenizer
from distill.recipe import load_recipe
from distill.tokens import encode_prompt
from eval.client import arrivals
from eval.counters import Counters
from eval.served import ServedRow, build_served
from eval.served_view import render_served
from eval.serving import loads_of, main, questions_of
from eval.setup import requests_of
from tests.conftest import make_noisy
from tests.servers import free_port, save, serve

Urls = tuple[str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target") / "writer")


@pytest.fixture(scope="module")
def urls(folder: Path) -> Iterator[Urls]:
    with serve(folder) as (one, _), serve(folder) as (two, _):
        yield one, two


@pytest.fixture
def recipe(tmp_path: Path, folder: Path) -> str:
    lines = [
        {"prompt": f"{domain}: add {word} apples", "id": f"{domain}-{word}", "domain": domain}
        for domain in ("code", "qa")
        for word in ("two", "five", "seven")
    ]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "recipe.json"
    path.write_text(
        json.dumps(
            {
                "name": "tiny",
                "output_dir": str(tmp_path / "runs"),
                "target": {"model": str(folder), "dtype": "float32"},
                "draft": {"num_layers": 1},
                "traffic": {"heldout": str(tmp_path / "heldout.jsonl"), "max_prompt_tok": 100},
                "eval": {"num_requests": 3, "min_requests": 2, "max_new_tok": 12, "domains": ["code", "qa"]},
            }
        )
    )
    return str(path)


def rows_of(out: Path) -> list[dict]:
    head, *rows = (json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines())
    assert head == {"format": 2, "holds": "served rows"}
    return rows


def test_two_servers_side_by_side(tmp_path: Path, recipe: str, urls: Urls) -> None:
    out = tmp_path / "out"
    report = tmp_path / "report.json"
    engine = {"arm": "draft:a@k3", "group": "short", "alpha": 0.5, "tau": 2.5, "batch": 1, "predicted_speedup": 1.4}
    engine |= {"latency_speedup": {"gmean": 1.5}, "tpot_ms": {"p50": 1.0, "p95": 2.0}}
    cells = [engine | {"domain": domain} for domain in ("code", "qa", "all")]
    report.write_text(json.dumps({"cells": cells, "choice": {"arm": "draft:a@k3"}}))
    words = [recipe, "--baseline", urls[0], "--server", urls[1], "--concurrency", "1,2", "--out", str(out)]
    assert main([*words, "--report", str(report)]) == 0
    rows = rows_of(out)
    assert len(rows) == 2 * (1 + 2 * 6) and sum(row["warmup"] for row in rows) == 2
    for row in rows:
        assert row["error"] is None and row["prompt_tok"] == row["own_prompt_tok"] > 0
        assert 0 < row["ttft_ms"] <= row["e2e_ms"] and row["end_s"] > row["start_s"]
        assert row["tpot_ms"] is None or row["ttft_ms"] + row["tpot_ms"] * (row["new_tok"] - 1) <= row["e2e_ms"]
        assert row["finish"] in ("stop", "length") and (row["new_tok"] == 12 or row["finish"] == "stop")
    result = json.loads((out / "serving.json").read_text())
    assert {(c["load"], c["domain"], c["arm"]) for c in result["cells"]} == {
        (load, domain, arm)
        for load in ("closed 1", "closed 2")
        for domain in ("code", "qa", "all")
        for arm in ("baseline", "server")
    }
    for cell in result["cells"]:
        assert cell["num_requests"] == (6 if cell["domain"] == "all" else 3) and cell["num_errors"] == 0
        assert cell["acceptance"] is None and cell["throughput_tok_s"] > 0
        if cell["arm"] == "server":
            assert cell["same_text_frac"] == 1.0 and cell["speedup"]["num_pairs"] == cell["num_requests"]
            assert cell["engine"]["alpha"] == 0.5
            # The engine measured one request at a time: its times predict that load alone.
            assert cell["engine"]["predicted_speedup"] == (1.4 if cell["load"] == "closed 1" else None)
    text = (out / "serving.md").read_text()
    assert (
        "n/a: the server tells nothing about acceptance" in text
        and "| engine B=1 |" in text
        and "| predicted |" in text
    )
    assert main([*words]) == 2  # never into rows of an earlier measurement


def test_texts_that_differ_are_judged_by_the_target(tmp_path: Path, recipe: str, folder: Path, urls: Urls) -> None:
    """The other server has a noisy copy of the target: where it leaves the baseline, that was the target's choice."""
    other = tmp_path / "noisy"
    make_noisy(load_model(str(folder), "float32"), 0.03).save_pretrained(other)
    load_tokenizer(str(folder)).save_pretrained(other)
    out = tmp_path / "out"
    with serve(other) as (url, _):
        words = [recipe, "--baseline", urls[0], "--server", url, "--concurrency", "1", "--out", str(out), "--ties"]
        assert main(words) == 0
    result = json.loads((out / "serving.json").read_text())
    texts = {(row["arm"], row["request_id"]): row["text"] for row in rows_of(out) if not row["warmup"]}
    ids = {request for _, request in texts}
    differ = {i for i in ids if texts["baseline", i] != texts["server", i]}
    assert 0 < len(differ) == result["ties"]["num_differ"]
    assert {p["request_id"] for p in result["ties"]["partings"]} == differ
    model, tokenizer = load_model(str(folder), "float32"), load_tokenizer(str(folder))
    for parting in result["ties"]["partings"]:
        question = next(q for q in questions_of(load_recipe(recipe, ()))[0] if q.id == parting["request_id"])
        prompt = encode_prompt(tokenizer, list(question.messages))
        whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=parting["place"] + 1)
        plain = whole[0, len(prompt) :].tolist()
        ours = tokenizer(texts["baseline", question.id], add_special_tokens=False)["input_ids"]
        assert ours[: parting["place"]] == plain[:-1] and parting["below"] == pytest.approx(0, abs=1e-5)
        assert parting["margin"] > 0 and parting["typical"] > 0
    assert f"{len(differ)} texts of 6 differ from the baseline's. Where" in (out / "serving.md").read_text()


def test_the_same_texts_need_no_judge(tmp_path: Path, recipe: str, urls: Urls) -> None:
    out = tmp_path / "out"
    words = [recipe, "--baseline", urls[0], "--server", urls[1], "--concurrency", "2", "--out", str(out), "--ties"]
    assert main(words) == 0
    assert json.loads((out / "serving.json").read_text())["ties"]["num_differ"] == 0
    assert "No text of 6 differs from the baseline's." in (out / "serving.md").read_text()


def test_a_server_that_answers_nothing_equals_nothing(tmp_path: Path, recipe: str, urls: Urls) -> None:
    """The speculating server of a trial died before its first answer: no text differed, since none was there."""
    out = tmp_path / "out"
    words = [recipe, "--baseline", urls[0], "--server", f"http://127.0.0.1:{free_port()}", "--model", "gone", "--ties"]
    assert main([*words, "--concurrency", "1", "--out", str(out)]) == 1
    text = (out / "serving.md").read_text()
    assert "no text was compared" in text and "differs from the baseline's" not in text


def test_fields_of_one_server_reach_it(tmp_path: Path, recipe: str, urls: Urls) -> None:
    """transformers' server takes a penalty, and refuses a field that it does not know by name."""
    texts = []
    for number, more in enumerate(([], ["--body", '{"frequency_penalty": 2.0}'])):
        out = tmp_path / str(number)
        assert main([recipe, "--server", urls[0], "--concurrency", "1", "--out", str(out), *more]) == 0
        texts.append([row["text"] for row in rows_of(out)])
    assert texts[0] != texts[1]
    assert json.loads((tmp_path / "1" / "serving.json").read_text())["settings"]["body"] == {"frequency_penalty": 2.0}
    words = [recipe, "--server", urls[0], "--concurrency", "1", "--out", str(tmp_path / "2"), "--body", '{"min_p": 0}']
    assert main(words) == 1
    assert all("min_p" in row["error"] for row in rows_of(tmp_path / "2"))


def test_sampling_servers_are_said_to_have_defaults(tmp_path: Path, recipe: str, urls: Urls) -> None:
    out = tmp_path / "out"
    words = [recipe, "--server", urls[0], "--concurrency", "1", "--out", str(out), "eval.temperature=0.7"]
    assert main(words) == 0
    assert "--body names it" in (out / "serving.md").read_text()


def test_an_open_loop_of_one_server(tmp_path: Path, recipe: str, urls: Urls) -> None:
    out = tmp_path / "out"
    assert main([recipe, "--server", urls[0], "--open-rate", "50", "--out", str(out), "eval.warmup=0"]) == 0
    rows = rows_of(out)
    assert {row["load"] for row in rows} == {"open 50/s"} and len(rows) == 6
    assert all(row["arm"] == "server" and row["error"] is None for row in rows)
    cells = json.loads((out / "serving.json").read_text())["cells"]
    assert all(c["speedup"] is None and c["engine"] is None for c in cells)


def test_a_server_that_dies_leaves_error_rows(tmp_path: Path, recipe: str, folder: Path) -> None:
    """It stops after the first answers: what was measured is kept, the rest says why there is no figure."""
    out = tmp_path / "out"
    with serve(folder) as (url, server):

        def stop() -> None:
            while not (out / "requests.jsonl").exists():
                stopping.wait(0.01)
            server.kill_server()

        stopping = threading.Event()
        thread = threading.Thread(target=stop)
        thread.start()
        main([recipe, "--server", url, "--concurrency", "1", "--out", str(out), "eval.max_new_tok=60"])
        thread.join()
    rows = rows_of(out)
    assert len(rows) == 7
    failed = [row for row in rows if row["error"] is not None]
    assert failed and rows[0]["error"] is None
    assert all(row["ttft_ms"] == row["e2e_ms"] == 0 and "Error" in row["error"] for row in failed)
    assert failed[-1]["retried"] == 2  # no connection: nothing was sent, so it was tried again
    cell = json.loads((out / "serving.json").read_text())["cells"][-1]
    assert cell["num_errors"] == len(failed) and cell["num_errors"] + cell["num_requests"] == 6
    assert "## Failed requests" in (out / "serving.md").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--server", "ftp://host"], "must be http(s)://HOST"),
        (["--server", "http://user:word@host"], "must be http(s)://HOST"),
        (["--server", "http://host", "--concurrency", "0"], "--concurrency = '0'"),
        (["--server", "http://host", "--concurrency", "4,4"], "--concurrency = '4,4'"),
        (["--server", "http://host", "--open-rate", "-1"], "--open-rate = -1"),
        (["--server", "http://host", "--baseline", "http://host"], "are both http://host"),
        (["--server", "http://host", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY holds no key"),
        (["--server", "http://host", "--body", "{top_k: 0}"], "--body '{top_k: 0}': not JSON"),
        (["--server", "http://host", "--body", "[1]"], "--body '[1]': a list"),
        (["--server", "http://host", "--body", '{"seed": 1}'], "--body sets 'seed'"),
        (["--server", "host:8000"], "--server = 'host:8000' must be http"),
        (["--server", "http://host", "--baseline", "ftp://host"], "--baseline = 'ftp://host' must be http"),
        (["--server", "http://host", "--ties"], "--ties compares greedy texts with the baseline's"),
        (["--server", f"http://127.0.0.1:{free_port()}"], "no endpoint answers"),
    ],
)
def test_bad_arguments_are_told_before_anything_is_asked(
    recipe: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe, *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert told in said and "word@" not in said


@pytest.mark.parametrize(("text", "told"), [("[1, 2]", "a list, no report"), ("{", "not JSON"), ("{}", "has no cells")])
def test_a_report_that_is_none_is_told(
    tmp_path: Path, recipe: str, urls: Urls, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    assert main([recipe, "--server", urls[0], "--report", str(path), "--out", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert told in said and "Traceback" not in said and not (tmp_path / "out").exists()


def test_prompts_beyond_the_targets_positions_are_left_out_as_eval_run_does(
    tmp_path: Path, recipe: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    positions = load_config(str(folder)).max_position_embeddings
    lines = [
        {"prompt": " ".join(["apples"] * num), "id": f"p{num}", "domain": domain}
        for domain, num in (("code", 3), ("code", positions), ("qa", 4))
    ]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = load_recipe(recipe, (f"traffic.max_prompt_tok={16 * positions}",))
    asked = [question.id for question in questions_of(chosen)[0]]
    measured = requests_of(chosen, load_tokenizer(str(folder)), positions).requests
    assert sorted(asked) == sorted(r.id for r in measured) == ["p3", "p4"]
    assert "1 held-out prompts left out" in caplog.text
    with pytest.raises(ValueError, match="the target's positions less"):
        questions_of(load_recipe(recipe, (f"eval.max_new_tok={positions - 1}", f"traffic.max_prompt_tok={positions}")))


def test_prompts_that_are_cut_for_a_server_are_told(tmp_path: Path, recipe: str, urls: Urls) -> None:
    lines = [
        {"prompt": " ".join(["apples"] * num), "id": f"p{num}", "domain": domain}
        for domain, num in (("code", 3), ("code", 300), ("qa", 4), ("qa", 5))
    ]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    words = [recipe, "eval.cut_long=true", "--server", urls[0], "--concurrency", "1", "--out", str(out)]
    assert main(words) == 0
    settings = json.loads((out / "serving.json").read_text())["settings"]
    assert settings["cut"]["code"]["ids"] == ["p300"] and settings["cut"]["code"]["limit_tok"] == 100
    assert not settings["left_out"] and not settings["not_asked"]
    assert "without their middle: 1 held-out prompt of code, cut to 100 tokens" in (out / "serving.md").read_text()


def test_loads() -> None:
    assert [load.name for load in loads_of(None, None)] == ["closed 1", "closed 4", "closed 16"]
    assert [load.name for load in loads_of(None, 2.5)] == ["open 2.5/s"]
    assert [load.name for load in loads_of("8", 2.5)] == ["closed 8", "open 2.5/s"]


def test_arrivals_keep_their_rate() -> None:
    times = list(islice(arrivals(4.0, 0), 4001))
    gaps = [later - before for before, later in pairwise(times)]
    assert times[0] == 0 and times == list(islice(arrivals(4.0, 0), 4001))
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert fmean(gap > 0.25 for gap in gaps) == pytest.approx(0.368, abs=0.03)  # exponential: e^-1 above the mean


def served(arm: str, request: str, start_s: float, e2e_ms: float, new_tok: int = 10, **changes: object) -> ServedRow:
    row = ServedRow(
        request, "code", "short", arm, "closed 2", False, None, 5, new_tok, 5, 0, "stop", 10.0, 2.0, e2e_ms, start_s,
        start_s + e2e_ms / 1e3, 0, "x", {},
    )  # fmt: skip
    return replace(row, **changes)


def test_cells_by_hand() -> None:
    """Two overlapping requests: tokens over the union of spans; speedups paired and per token; failures apart."""
    rows = [
        served("baseline", "a", 0.0, 1000.0),
        served("baseline", "b", 0.5, 1000.0),
        served("server", "a", 10.0, 500.0),
        served("server", "b", 10.0, 1000.0, 20, text="y"),
        served("server", "c", 10.0, 0.0, 0, error="HTTP 500: no"),
        served("server", "w", 0.0, 9999.0, warmup=True),
    ]
    counted = {("server", "closed 2", "code"): Counters(10, 30, 20, (9, 6, 5))}
    base, mine = build_served(rows, counted)
    assert base["throughput_tok_s"] == pytest.approx(20 / 1.5) and base["acceptance"] is None
    assert mine["throughput_tok_s"] == pytest.approx(30 / 1.0)
    assert mine["speedup"] == {"gmean": pytest.approx(2.0), "num_pairs": 2} and mine["same_text_frac"] == 0.5
    assert mine["num_requests"] == 2 and mine["errors"] == {"HTTP 500: no": 1}
    assert mine["acceptance"]["tau"] == pytest.approx(3.0) and mine["acceptance"]["source"] == "vLLM counters"
    result = {"recipe": "r", "servers": {}, "report": None, "cells": [base, mine], "settings": {"temperature": 0.0}}
    text = render_served(result)
    assert "| 2.00x | 0.667 | 3.00 |" in text and "HTTP 500: no" in text
