"""Bad input by the thousand: each gives a good value or one clear message, and never a traceback.

A fixed seed makes the inputs. SPECDRAFT_FUZZ multiplies their number (1 takes seconds; 50 takes an hour or so);
SPECDRAFT_FUZZ_SEED gives others.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import struct
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from distill.checkpoint import verify_draft, write_draft
from distill.models import load_model, load_tokenizer
from distill.recipe import load_recipe
from distill.schema import Recipe, Traffic
from distill.shape import find_target
from distill.tokens import encode_prompt, eos_ids
from distill.traffic import load_prompts
from distill.train import main
from eval.report import build_report, write_report
from eval.rowfile import append_rows, read_rows
from scripts.readme_report import END, START
from scripts.readme_report import main as readme
from tests.conftest import make_target, make_tokenizer
from tests.distill.test_train import newest, write_world
from tests.eval.rows import make_plan, make_run
from tests.eval.test_report import PROVENANCE, settings

TIMES = float(os.environ.get("SPECDRAFT_FUZZ", "1"))
SEED = int(os.environ.get("SPECDRAFT_FUZZ_SEED", "20240607"))
ROOT = Path(__file__).parents[2]
ODD_NAME = "räume mit leer 漢字 ' #1"  # a folder that quoting, globs and encodings stumble over
SLOW_S = 10.0


class Tally:
    """What became of the inputs; faults are told apart by the line that raised."""

    def __init__(self, kind: str) -> None:
        self.kind, self.outcomes = kind, Counter[str]()
        self.faults: dict[str, str] = {}

    @contextmanager
    def case(self, about: object, allowed: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
        """One input: whatever it raises must be allowed, short enough to read, and quick."""
        started = time.perf_counter()
        try:
            yield
            self.outcomes["taken"] += 1
        except allowed as error:
            self.outcomes["refused"] += 1
            if time.perf_counter() - started > SLOW_S:
                self.faults["slow to refuse"] = repr(about)[:500]
            if not str(error).strip() or len(str(error)) > 4000:
                self.faults[f"message of {len(str(error))} characters"] = repr(about)[:500]
        except Exception as error:  # noqa: BLE001 - every other exception is what we look for
            frames = traceback.extract_tb(error.__traceback__)
            ours = next((f for f in reversed(frames) if f.filename.startswith(str(ROOT))), frames[-1])
            where = " from ".join(f"{Path(f.filename).name}:{f.lineno}" for f in (frames[-1], ours))
            self.faults.setdefault(f"{type(error).__name__} at {where}", f"{about!r:.500}: {error!s:.300}")

    def close(self) -> None:
        """Says how many were tried and fails on any fault."""
        print(f"\n{self.kind}: {sum(self.outcomes.values())} tried, {dict(self.outcomes)}")  # noqa: T201
        lines = [f"{where}\n      {example}" for where, example in self.faults.items()]
        assert not lines, f"{self.kind}: {len(lines)} kinds of fault\n  " + "\n  ".join(lines)


def times(number: int) -> range:
    return range(max(1, round(number * TIMES)))


def damage(data: bytes, rng: random.Random) -> bytes:
    """One accident to a file: cut, flipped bits, a hole, noise, another encoding, something doubled."""
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 2, 8, 64, 512))
    kind = rng.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(rng.randrange(256) for _ in range(size)) + data[at + size :]
    if kind == 2:
        return data[:at] + data[at + size :]
    if kind == 3:
        return data[:at] + bytes(rng.randrange(256) for _ in range(size)) + data[at:]
    if kind == 4:
        return data[:at] + data[at : at + size] + data[at:]
    if kind == 5:
        return data[:at] + b"\0" * size + data[at + size :]
    if kind == 6:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    return b"" if rng.random() < 0.2 else data[at:]


# What a person, a script or a model may write where something else was expected.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3.5, -0.5, 1e-9, 1e308, 10**30, "", " ", "x", "1e-4", "null", "../..", "/", "~",
    "~nobody/x", "*", "a b", "ünïcödé 漢字", "\u202e\u2028", "\x1b[31m", "a\nb", [], [0], [1, 1], [3, 2], [None], ["x"],
    [[1]], {}, {"a": 1}, {"kind": "full"}, {"kind": 1}, "bundled", ["bundled", "bundled"], "x" * 3000, list(range(300)),
)  # fmt: skip
TRAPS = (
    "yes", "no", "on", "~", ".nan", "-.inf", "0x10", "0o7", "1_000", "12:30:00", "2024-01-01", "1e400", "!!set {a}",
    "!!binary aGk=", "!!python/object/apply:os.system [echo]", "!!float x", "&a [*a]", "*nothing", "<<: {a: 1}", "? a",
    "- 1", "{a: 1, a: 2}", "[1", "'", '"', "|", ">", "@x", "`x`", "%x", "# x", "\t", "key: value: more", "!x y",
    "!!int '3'", "!!int x", "!!bool x", "2024-13-45",
    "---\nname: b", "...", "\ufeff", "\x00", "\x07", "\x85", "\ud7ff", "{" * 300, "[" * 3000, "9" * 5000,
)  # fmt: skip


def test_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T60, T61, T62: unknown, misspelt, out of range, of another type, doubled, and what YAML makes of it."""
    rng, tally = random.Random(SEED), Tally("recipes")
    texts = [path.read_text() for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    keys = [
        f"{stage}.{name}" if hasattr(field.annotation, "model_fields") else stage
        for stage, field in Recipe.model_fields.items()
        for name in getattr(field.annotation, "model_fields", {"": None})
    ] + ["draft.head.kind", "draft.head.size", "distill.loss.tv", "draft.head"]
    folder = tmp_path / ODD_NAME
    folder.mkdir()
    for _ in times(120):
        text, overrides = rng.choice(texts), list[str]()
        for _ in range(rng.choice((1, 1, 2, 3))):
            kind = rng.randrange(5)
            lines = text.split("\n")
            at = rng.randrange(len(lines))
            if kind == 0:
                key = rng.choice(keys)
                if rng.random() < 0.3:  # misspelt
                    cut = rng.randrange(1, len(key))
                    key = key[:cut] + rng.choice(("", "x", "_", ".", "-", "é")) + key[cut + 1 :]
                value = json.dumps(rng.choice(VALUES)) if rng.random() < 0.7 else rng.choice(TRAPS)
                overrides.append(f"{key}={value}")
            elif kind == 1:
                head = lines[at].partition(":")[0]
                lines[at] = f"{head}: {rng.choice(TRAPS) if rng.random() < 0.5 else json.dumps(rng.choice(VALUES))}"
            elif kind == 2:
                lines[at:at] = [rng.choice((lines[at], rng.choice(TRAPS), " " + lines[at], lines[at] + ":"))]
            elif kind == 3:
                del lines[at]
            else:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            text = "\n".join(lines)
        data = text.encode("utf-8", "surrogatepass")
        path = folder / "recipe 1.yaml"
        path.write_bytes(damage(data, rng) if rng.random() < 0.25 else data)
        with tally.case((overrides, text)):
            code = main([str(path), "--check", *overrides])
            said = capsys.readouterr().err
            assert code in (0, 2), code
            if code:
                assert said.startswith("error: ") and "recipe 1.yaml" in said and "Traceback" not in said, said
                raise ValueError(said)
    assert [p.name for p in folder.iterdir()] == ["recipe 1.yaml"], "a refused recipe left something behind"
    tally.close()


def rows_of(rng: random.Random) -> list[dict[str, Any]]:
    """Good rows of traffic, some with columns that nobody asked for."""
    rows = []
    for n in range(rng.randrange(1, 12)):
        row: dict[str, Any] = {"id": f"r{n}", "domain": rng.choice(("code", "math")), "meta": rng.choice(VALUES)}
        if rng.random() < 0.5:
            row["prompt"] = f"Say {n} words about {rng.random()}."
        else:
            row["messages"] = [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "1 2"}]
        rows.append(row)
    return rows


ROLES = (None, "human", "USER", "system", "assistant", "user", 3, ["user"], {"user": 1})


def test_traffic(tmp_path: Path) -> None:
    """T18, T19, T20, T23: broken lines and archives, changing columns, bad roles, other encodings."""
    rng, tally = random.Random(SEED + 1), Tally("traffic files")
    folder = tmp_path / ODD_NAME
    folder.mkdir()
    (folder / "heldout.jsonl").write_text('{"prompt": "other", "meta": "other", "nothing": "other"}\n')
    tokenizer = make_tokenizer()
    for i in times(300):
        rows = rows_of(rng)
        for _ in range(rng.choice((0, 1, 2))):
            row = rng.choice(rows)
            kind = rng.randrange(4)
            if kind == 0:
                row[rng.choice(("prompt", "messages", "reference", "id", "domain", "source", "meta"))] = rng.choice(
                    VALUES
                )
            elif kind == 1:
                row["messages"] = [
                    {"role": rng.choice(ROLES), "content": rng.choice(VALUES)} for _ in range(rng.randrange(3))
                ]
            elif kind == 2:
                row["messages"] = [*rows[0].get("messages", []), rng.choice((rng.choice(VALUES), {"role": "user"}))]
            else:
                row["prompt"] = rng.choice(
                    ("\ud800", "\x00", "a" * 200_000, "\u2028\u0085", "<|im_end|>" * 50, "\x1b[2J")
                )
        data = "\n".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows).encode(
            "utf-8", "surrogatepass"
        )
        if rng.random() < 0.3:
            nasty = (
                b"[" * 100_000,
                b'{"a":' * 100_000,
                b"9" * 6000,
                b"NaN",
                b"\xff\xfe",
                b'"x"',
                b"{}",
                b'{"prompt":1e999}',
            )
            data += b"\n" + rng.choice(nasty)
        suffix = rng.choice((".jsonl", ".jsonl", ".jsonl.gz", ".parquet"))
        if suffix == ".parquet":
            table = pyarrow.table(
                {"prompt": [str(row.get("prompt", "x")).encode("utf-8", "replace").decode() for row in rows]}
            )
            pyarrow.parquet.write_table(table, folder / "t.parquet")
            data = (folder / "t.parquet").read_bytes()
            (folder / "t.parquet").unlink()
        elif suffix == ".jsonl.gz":
            data = gzip.compress(data)
        if rng.random() < 0.6:
            data = damage(data, rng)
        path = folder / f"rows [{i % 3}]{suffix}"
        path.write_bytes(data)
        column = rng.choice(("prompt", "prompt", "messages", "meta", "nothing"))
        traffic = Traffic(
            train=str(path),
            heldout=str(folder / "heldout.jsonl"),
            domain=rng.choice(("code", "mixed")),
            prompt_column=column,
            on_bad_line=rng.choice(("refuse", "skip")),
        )
        with tally.case((data[:300], traffic)):
            try:
                prompts = load_prompts(traffic, "train", 0)
            except ValueError as error:
                # A file is named, except where all of it was read and nothing was left.
                assert any(name in str(error) for name in (path.name, "heldout.jsonl", "no prompt left")), error
                raise
            for prompt in prompts:
                assert prompt.messages and all(
                    turn["role"] in ("system", "user", "assistant") for turn in prompt.messages
                )
                ids = encode_prompt(tokenizer, prompt.messages)
                assert ids and json.loads(json.dumps(prompt.messages)) == list(prompt.messages)
        path.unlink()
    tally.close()


def edit_json(path: Path, rng: random.Random) -> str:
    """Another value, or none, at a random place of a JSON file."""
    value = json.loads(path.read_text())
    at, trail = value, list[str]()
    while True:
        places = list(at) if isinstance(at, dict) else list(range(min(len(at), 50)))
        if not places:
            break
        place = rng.choice(places)
        trail.append(str(place))
        if isinstance(at[place], dict | list) and at[place] and rng.random() < 0.6:
            at = at[place]
            continue
        if rng.random() < 0.3:
            del at[place]
        else:
            at[place] = rng.choice(VALUES)
        break
    path.write_text(json.dumps(value))
    return ".".join(trail)


def break_header(path: Path, rng: random.Random) -> str:
    """A safetensors file whose header tells another story: shapes, names, offsets, types."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    kind = rng.choice(("shape", "offsets", "dtype", "gone", "renamed", "length"))
    if kind == "shape":
        header[name]["shape"] = list(reversed(header[name]["shape"])) if len(set(header[name]["shape"])) > 1 else [1, 1]
    elif kind == "offsets":
        header[name]["data_offsets"] = [rng.randrange(1 << 20), rng.randrange(1 << 40)]
    elif kind == "dtype":
        header[name]["dtype"] = rng.choice(("I8", "F64", "BOOL", "X9"))
    elif kind == "gone":
        del header[name]
    elif kind == "renamed":
        header[f"{name}.x"] = header.pop(name)
    text = json.dumps(header).encode()
    length = rng.choice((0, 1 << 40, size + 9)) if kind == "length" else len(text)
    path.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])
    return f"{kind} of {name}"


def break_checkpoint(folder: Path, rng: random.Random) -> str:
    """One accident to a checkpoint folder."""
    path = rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    kind = rng.randrange(6)
    if kind == 0:
        path.unlink()
        return f"{path.name} is gone"
    if kind == 1 and path.suffix == ".json":
        return f"{path.name}: {edit_json(path, rng)} edited"
    if kind == 2:
        weights = rng.choice(sorted(folder.glob("*.safetensors")))
        return break_header(weights, rng)
    if kind == 3:
        weights = folder / "model.safetensors"
        if weights.exists() and rng.random() < 0.5:
            weights.rename(folder / rng.choice(("pytorch_model.bin", "model.pt", "model-00001-of-00002.safetensors")))
            return "weights under another name"
        make_tokenizer(size=480).save_pretrained(folder)
        return "another tokenizer"
    path.write_bytes(damage(path.read_bytes(), rng))
    return f"{path.name} damaged"


RECIPE = """
name: fuzz
target: {model: %s, dtype: float32}
draft: {num_layers: 2, size_frac: [0.01, 0.99]}
trainer: {accelerator: cpu}
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole checkpoint, one in shards, and a draft folder."""
    folder = tmp_path_factory.mktemp("whole")
    target, tokenizer = make_target(), make_tokenizer()
    for name, shard in (("one", "1GB"), ("shards", "200KB")):
        target.save_pretrained(folder / name, max_shard_size=shard)
        tokenizer.save_pretrained(folder / name)
    write_draft(folder / "draft", target, tokenizer, {"traffic": {}}, shortlist=range(256), eos_ids=(1, 4))
    assert len(list((folder / "shards").glob("*.safetensors"))) > 1
    return {name: folder / name for name in ("one", "shards", "draft")}


def test_checkpoints(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T44, T48: missing shards, other shapes, cut files, another tokenizer, pickles. A model that loads is whole."""
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    rng, tally = random.Random(SEED + 2), Tally("checkpoints")
    whole = make_target().state_dict()
    for i in times(40):
        kind = rng.choice(("one", "shards", "draft"))
        folder = tmp_path / f"{ODD_NAME} {i}"
        shutil.copytree(checkpoints[kind], folder)
        about = break_checkpoint(folder, rng)
        with tally.case((kind, about)):
            if kind == "draft":
                tokenizer = make_tokenizer()
                verify_draft(folder, load_tokenizer(str(folder)), tokenizer, 512)
                load_model(str(folder), "float32")
            else:
                (tmp_path / "recipe.yaml").write_text(RECIPE % json.dumps(str(folder)))
                target = find_target(load_recipe(tmp_path / "recipe.yaml"))
                model = load_model(target.folder, "float32")
                eos_ids(target.config, model.generation_config, target.tokenizer)
                if "edited" not in about and "damaged" not in about and "dtype" not in about:
                    for name, value in model.state_dict().items():
                        assert value.equal(whole[name]), f"{name} was made up: {about}"
        shutil.rmtree(folder)
    tally.close()


def test_run_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T44, T46: a run whose files were damaged goes on, or says which file is broken; no draft appears then."""
    rng, tally = random.Random(SEED + 5), Tally("run folders")
    world = write_world(tmp_path)
    recipe = [str(world / "recipe.yaml"), "track.mode=disabled"]
    assert main(recipe) == 0
    run = newest(world)
    shutil.rmtree(run / "draft")
    capsys.readouterr()
    for i in times(6):
        folder = run.parent / f"broken {i}"
        shutil.copytree(run, folder, symlinks=True)
        path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".log", ".svg")))
        about = f"{path.relative_to(folder)} damaged"
        if path.suffix == ".json" and rng.random() < 0.6:
            about = f"{path.relative_to(folder)}: {edit_json(path, rng)} edited"
        elif path.suffix == ".safetensors" and rng.random() < 0.5:
            about = f"{path.relative_to(folder)}: {break_header(path, rng)}"
        elif rng.random() < 0.2:
            path.unlink()
            about = f"{path.relative_to(folder)} is gone"
        else:
            path.write_bytes(damage(path.read_bytes(), rng))
        with tally.case(about):
            code = main(["--resume", str(folder)])
            said = capsys.readouterr().err
            assert code in (0, 2), (code, said[-300:])
            assert (folder / "draft" / "draft.json").exists() == (code == 0)
            if code:
                message = said[said.rindex("error: ") :]
                assert any(part in message for part in (folder.name, "recipe")), message
                raise ValueError(message)
        shutil.rmtree(folder)
    tally.close()


def test_rows(tmp_path: Path) -> None:
    """Rows of an evaluation: unknown versions, cut files, fields that contradict. What is read can be reported."""
    rng, tally = random.Random(SEED + 3), Tally("files of rows")
    path = tmp_path / "requests.jsonl"
    append_rows(path, make_run(num=5, ks=(2,)))
    whole = path.read_text().split("\n")
    for i in times(60):
        lines = list(whole)
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(lines) - 1)
            record = json.loads(lines[at])
            kind = rng.randrange(4)
            if kind == 0:
                record[rng.choice(list(record))] = rng.choice(VALUES)
            elif kind == 1:
                record.pop(rng.choice(list(record)))
            elif kind == 2 and record.get("cycles"):
                cycle = rng.choice(record["cycles"])
                cycle[rng.randrange(4)] = rng.choice((*VALUES, 1.5, 17))
            elif record.get("phases_ms"):
                record["phases_ms"][rng.choice(("draft", "verify", "host"))] = rng.choice((*VALUES, -3.0))
            lines[at] = json.dumps(record)
        data = "\n".join(lines).encode()
        path.write_bytes(damage(data, rng) if rng.random() < 0.4 else data)
        with tally.case(data[:300]):
            found = read_rows(path)
            if found:
                report = build_report(found, make_plan(), PROVENANCE, settings(bootstrap=100))
                json.dumps(report, allow_nan=False)
                if i % 20 == 0:
                    write_report(tmp_path / "out", report)
    tally.close()


def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports of unknown versions and cut ones: nothing is put into the README."""
    rng, tally = random.Random(SEED + 4), Tally("reports")
    text = json.dumps(build_report(make_run(num=5, ks=(2,)), make_plan(), PROVENANCE, settings()))
    path, page = tmp_path / "report.json", tmp_path / "README.md"
    for _ in times(150):
        report = json.loads(text)
        kind = rng.randrange(3)
        if kind == 0:
            report["format"] = rng.choice((*VALUES, 2, "1"))
        elif kind == 1:
            name = rng.choice(list(report))
            report.pop(name)
        data = json.dumps(report).encode()
        path.write_bytes(damage(data, rng) if kind == 2 else data)
        page.write_text(f"{START}\n{END}\n")
        with tally.case((kind, data[:100])):
            code = readme([str(path), str(page)])
            said = capsys.readouterr().err
            if code:
                assert code == 2 and said.startswith("error: ") and page.read_text() == f"{START}\n{END}\n"
                raise ValueError(said)
    tally.close()
