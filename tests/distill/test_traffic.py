"""Prompts from files and generators: read as they are, refused by place, never twice, never in both splits."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.bundled import bundled_prompts
from distill.recipe import Traffic
from distill.traffic import Prompt, TrafficError, load_prompts

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traffic"


def rows(count: int, start: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {i} + {i}?", **more} for i in range(start, start + count)]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def stage(train: Path | str | tuple[str, ...], **more: Any) -> Traffic:
    return Traffic(train=train if isinstance(train, tuple) else str(train), domain=more.pop("domain", "math"), **more)


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_t18_unused_columns_never_matter(tmp_path: Path) -> None:
    records = rows(6)
    for record, meta in zip(records, (None, None, None, {"a": 1}, "x", 3)):
        record["meta"] = meta
    records[5]["extra"] = True
    assert len(load_prompts(stage(write(tmp_path / "a.jsonl", records)), "train", 0)) == 6
    assert len(load_prompts(stage(write(tmp_path / "b.jsonl", rows(6, tags=[]))), "train", 0)) == 6


@pytest.mark.parametrize(
    "column, value", [("prompt", 5), ("prompt", ["x"]), ("reference", {"a": 1}), ("messages", "x")]
)
def test_t18_a_used_column_that_changes_type_is_named(tmp_path: Path, column: str, value: Any) -> None:
    records = rows(5)
    records[3][column] = value
    with pytest.raises(TrafficError, match=rf"a\.jsonl:4, column '{column}': is {type(value).__name__}"):
        load_prompts(stage(write(tmp_path / "a.jsonl", records)), "train", 0)


def test_t19_blank_lines_bom_and_a_missing_newline_are_fine_a_broken_line_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}\n{not json}\n{"prompt": "c"}')
    with pytest.raises(TrafficError, match=r"a\.jsonl:4: broken line.*on_bad_line=skip"):
        load_prompts(stage(path), "train", 0)
    with caplog.at_level(logging.INFO):
        assert sorted(texts(load_prompts(stage(path, on_bad_line="skip"), "train", 0))) == ["a", "b", "c"]
    assert "1 bad row" in caplog.text


@pytest.mark.parametrize(
    "line", [b"[1, 2]", b'"text"', b"\xff\xfe", b'{"prompt": "a"', '{"prompt": "a"}'.encode("utf-16-le")]
)
def test_t19_other_kinds_of_broken_lines(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(TrafficError, match=r"a\.jsonl:2: broken line"):
        load_prompts(stage(path), "train", 0)


def test_t19_a_unicode_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', encoding="utf-8", newline="")
    assert sorted(texts(load_prompts(stage(path), "train", 0))) == ["a\u2028b", "c"]


def test_t19_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", rows(500))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TrafficError, match=r"a\.jsonl\.gz: damaged gzip data after line \d+"):
        load_prompts(stage(path), "train", 0)


@pytest.mark.parametrize("on_bad_line", ["refuse", "skip"])
def test_packed_data_under_a_plain_name_are_named_and_not_skipped(on_bad_line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(tmp_path / "a.jsonl.gz", rows(500)).rename(path)
    with pytest.raises(TrafficError, match=r"a\.jsonl: gzip data; give it a name that ends in \.jsonl\.gz"):
        load_prompts(stage(path, on_bad_line=on_bad_line), "train", 0)


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_t23_wrong_roles_deep_in_a_file_are_named_and_no_answer_is_invented(tmp_path: Path) -> None:
    records = [chat(("user", f"q {i}"), ("assistant", f"a {i}")) for i in range(200)]
    records[149] = chat(("user", "ends"), ("assistant", "x"), ("user", "in a question"))
    records[150] = chat(("human", "who is that"), ("assistant", "x"))
    records[151] = chat(("user", "nobody answers"))
    path = write(tmp_path / "a.jsonl", records)
    with pytest.raises(TrafficError, match=r"a\.jsonl:151, column 'messages', message 0: role 'human'; allowed are"):
        load_prompts(stage(path), "train", 0)
    prompts = load_prompts(stage(path, on_bad_line="skip"), "train", 0)
    by_text = {prompt.messages[-1]["content"]: prompt for prompt in prompts}
    assert len(prompts) == 199 and "who is that" not in by_text
    assert by_text["in a question"].reference is None and len(by_text["in a question"].messages) == 3
    assert by_text["nobody answers"].reference is None
    assert by_text["q 7"].reference == "a 7" and by_text["q 7"].messages == ({"role": "user", "content": "q 7"},)


@pytest.mark.parametrize(
    "record, named",
    [
        (chat(("system", "s")), "no user's turn"),
        (chat(("assistant", "a")), "no user's turn"),
        (chat(("user", " ")), "prompt is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"messages": []}, "is empty, must be a list of messages"),
        ({"messages": ["hi"]}, "role None"),
        ({"messages": [{"role": "user", "content": None}]}, "content is NoneType"),
        ({"question": "x"}, "neither column 'messages' nor 'prompt' has a value; the row has 'question'"),
        ({}, "no column"),
    ],
)
def test_rows_that_hold_no_request_are_named(tmp_path: Path, record: dict[str, Any], named: str) -> None:
    path = write(tmp_path / "a.jsonl", [*rows(2), record])
    with pytest.raises(TrafficError, match=rf"a\.jsonl:3.*{named}"):
        load_prompts(stage(path), "train", 0)


def test_text_parts_of_a_message_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": parts}]}])
    assert texts(load_prompts(stage(path), "train", 0)) == ["What is this?"]


def test_paths_globs_lists_and_parquet(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", rows(5))
    write(tmp_path / "b.jsonl.gz", rows(5, 5))
    table = {"prompt": [f"p{i}" for i in range(4)], "reference": ["r"] * 4, "blob": [[i] for i in range(4)]}
    pq.write_table(pa.table(table), tmp_path / "c.parquet")
    assert len(load_prompts(stage(f"{tmp_path}/[ab].jsonl*"), "train", 0)) == 10
    several = (f"{tmp_path}/a.jsonl", f"{tmp_path}/c.parquet")
    prompts = load_prompts(stage(several), "train", 0)
    assert len(prompts) == 9
    assert {prompt.id for prompt in prompts} >= {"a.jsonl:1", "c.parquet:4"}
    assert {prompt.reference for prompt in prompts} == {None, "r"}


def test_parquet_with_messages_and_other_column_names(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}] for i in range(3)]
    pq.write_table(pa.table({"conversation": turns, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(TrafficError, match=r"neither column 'messages' nor 'prompt'; it has 'conversation', 'n'"):
        load_prompts(stage(tmp_path / "a.parquet"), "train", 0)
    prompts = load_prompts(stage(tmp_path / "a.parquet", messages_column="conversation"), "train", 0)
    assert sorted(texts(prompts)) == ["q0", "q1", "q2"] and prompts[0].reference == "a"
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(TrafficError, match="not readable as parquet"):
        load_prompts(stage(tmp_path / "broken.parquet"), "train", 0)


@pytest.mark.parametrize("make, named", [
    (lambda folder: folder / "none.jsonl", "no such file"),
    (lambda folder: folder, "is a folder"),
    (lambda folder: write(folder / "a.csv", rows(1)), "unknown file type"),
])  # fmt: skip
def test_sources_that_cannot_be_read_are_refused(tmp_path: Path, make: Callable[[Path], Path], named: str) -> None:
    with pytest.raises(TrafficError, match=named):
        load_prompts(stage(make(tmp_path)), "train", 0)


def test_a_hub_id_without_network_is_one_clear_message() -> None:
    code = (
        "from distill.traffic import *; from distill.recipe import Traffic\n"
        "try: load_prompts(Traffic(train='nobody/no-such-set'), 'train', 0)\n"
        "except TrafficError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.startswith("nobody/no-such-set: no such file, and no readable hub data set with split 'train'")


def test_duplicates_and_held_out_prompts_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spaced = [{"prompt": "what  is\n1 + 1?"}]
    train = write(tmp_path / "train.jsonl", [*rows(10), *spaced, *rows(3)])
    held = write(tmp_path / "held.jsonl", rows(2, 5))
    with caplog.at_level(logging.INFO):
        prompts = load_prompts(stage(train, heldout=str(held)), "train", 0)
    assert sorted(texts(prompts)) == sorted(f"What is {i} + {i}?" for i in (0, 1, 2, 3, 4, 7, 8, 9))
    assert "14 read" in caplog.text and "4 duplicate" in caplog.text and "2 also held out" in caplog.text
    # 3 + 4 and 3 - 4 are two problems.
    signs = write(tmp_path / "signs.jsonl", [{"prompt": "3 + 4"}, {"prompt": "3 - 4"}])
    assert len(load_prompts(stage(signs), "train", 0)) == 2


def test_the_same_code_under_another_instruction_is_held_out_too(tmp_path: Path) -> None:
    block = (
        "```python\ndef area(width: float, height: float) -> float:\n    "
        + '"""The area of a rectangle with these sides."""\n```'
    )
    train = write(tmp_path / "train.jsonl", [{"prompt": f"Finish it.\n\n{block}"}, {"prompt": "other"}])
    held = write(tmp_path / "held.jsonl", [{"prompt": f"{block}\n\nWrite the body."}])
    assert texts(load_prompts(stage(train, heldout=str(held)), "train", 0)) == ["other"]


def test_the_sample_depends_on_seed_and_text_not_on_order(tmp_path: Path) -> None:
    forward = write(tmp_path / "a.jsonl", rows(300))
    backward = write(tmp_path / "b.jsonl", rows(300)[::-1])
    pick = [
        texts(load_prompts(stage(path, num_train=20), "train", seed)) for path in (forward, backward) for seed in (1, 2)
    ]
    assert pick[0] == pick[2] and pick[1] == pick[3] and pick[0] != pick[1]
    assert len(set(pick[0])) == 20


def test_domains_of_own_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [*rows(6, domain="math"), *rows(4, 6, domain="code"), *rows(2, 10)]
    train = write(tmp_path / "train.jsonl", records)
    with caplog.at_level(logging.INFO):
        assert len(load_prompts(stage(train), "train", 0)) == 8  # a row that names no domain is of the recipe's
    assert "4 other domain" in caplog.text
    assert len(load_prompts(stage(train, domain="mixed"), "train", 0)) == 12
    with pytest.raises(TrafficError, match="domains found: code, law, math"):
        load_prompts(Traffic(domain="law", train="x.jsonl", heldout=str(train)), "heldout", 0, ["qa"])
    found = load_prompts(Traffic(heldout=str(train), num_heldout=3), "heldout", 0)
    assert [prompt.domain for prompt in found] == ["code"] * 3 + ["math"] * 3
    found = load_prompts(Traffic(heldout=str(train), num_heldout=3), "heldout", 0, ["math", "qa"])
    assert {prompt.domain for prompt in found} == {"math"} and "no held-out prompt of domain qa" in caplog.text


def test_ids_are_unique(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"id": "same", **row} for row in rows(5)])
    assert len({prompt.id for prompt in load_prompts(stage(path), "train", 0)}) == 5


def test_fewer_prompts_than_asked_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_prompts(stage(write(tmp_path / "a.jsonl", rows(5))), "train", 0)
    assert "2000 prompts asked for, only 5 there" in caplog.text


@pytest.mark.parametrize("domain", ["code", "math", "qa"])
def test_bundled_prompts_are_many_distinct_and_in_one_split(domain: str) -> None:
    train = load_prompts(Traffic(domain=domain, num_train=100_000), "train", 0)
    held = load_prompts(Traffic(num_heldout=100_000), "heldout", 0, [domain])
    keys = [{" ".join(text.casefold().split()) for text in texts(prompts)} for prompts in (train, held)]
    assert len(keys[0]) == len(train) >= 2000 and len(keys[1]) == len(held) >= 200
    assert not keys[0] & keys[1]
    assert {prompt.domain for prompt in (*train, *held)} == {domain}
    assert all(0 < len(text) < 4000 for text in (*texts(train), *texts(held)))
    assert not [text for text in texts(train) if "{" in text and "}" in text and domain == "math"]
    # No module, and no small task, feeds both splits.
    library = [
        {prompt.source for prompt in prompts if "standard library" in prompt.source} for prompts in (train, held)
    ]
    assert not library[0] & library[1] and (domain == "math" or all(library))


@pytest.mark.parametrize("domain", ["code", "math", "qa"])
def test_bundled_prompts_load_within_five_seconds(domain: str) -> None:
    code = (
        "import time; from distill.traffic import load_prompts; from distill.recipe import Traffic\n"
        f"load_prompts(Traffic(domain={domain!r}), 'train', 0); print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 5


def test_bundled_prompts_are_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from distill.bundled import bundled_prompts\n"
        "prompts = [bundled_prompts(domain, 'heldout') for domain in ('code', 'math', 'qa')]\n"
        "print(hashlib.sha256(repr(prompts).encode()).hexdigest())"
    )
    run = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert run[0] == run[1]


def test_a_mixed_draft_takes_as_many_bundled_prompts_of_each_domain() -> None:
    prompts = load_prompts(Traffic(domain="mixed", num_train=100), "train", 0)
    assert len(prompts) == 100
    counts = Counter(prompt.domain for prompt in prompts)
    assert sorted(counts.values()) in ([32, 34, 34], [33, 33, 34]) and counts.keys() == {"code", "math", "qa"}
    assert len({prompt.domain for prompt in prompts[:50]}) == 3  # shuffled, not one domain after another
    alone = load_prompts(Traffic(domain="qa", num_train=30), "train", 0)
    assert {prompt.id for prompt in alone} <= {prompt.id for prompt in prompts}  # the same order of the same domain


def test_an_unknown_bundled_domain_is_refused() -> None:
    with pytest.raises(ValueError, match="there are code, math, qa"):
        list(bundled_prompts("law", "train"))


def test_it_imports_no_torch() -> None:
    code = "import sys; import distill.traffic; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traffic folder is not beside this checkout")
@pytest.mark.parametrize("domain, at_least", [("code", 13_000), ("math", 10_700), ("qa", 6_800)])
def test_the_shared_traffic_loads_as_it_is(domain: str, at_least: int) -> None:
    traffic = Traffic(
        domain=domain, train=str(SHARED / "train_*.jsonl.gz"), heldout=str(SHARED / "heldout_*.jsonl.gz"),
        num_train=100_000, num_heldout=50,
    )  # fmt: skip
    train = load_prompts(traffic, "train", 0)
    assert len(train) >= at_least and {prompt.domain for prompt in train} == {domain}
    held = load_prompts(traffic, "heldout", 0)
    assert [prompt.domain for prompt in held] == ["code"] * 50 + ["math"] * 50 + ["qa"] * 50
    assert train[0].id.startswith(f"{domain}-train-") and train[0].source
