"""python -m scripts.data_scale [--rows N] [--dir DIR]: many prompts through traffic, de-duplication and bookkeeping.

Makes files of synthetic prompts whose duplicates and held-out ones are known, reads them as a recipe would, and writes
answers of a stub (a few tokens with small hidden states) through the code that writes real ones. Says how long each
part took and how much memory the process had at most, and fails where a count is not the known one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from distill.recipe import Responses, Traffic
from distill.responses import Answered, list_work, take_answers
from distill.shards import ShardWriter
from distill.tokens import Messages
from distill.traffic import stream_prompts
from distill.worklist import Worklist

# Of 20 rows one repeats an earlier one in other spacing, and one in 50 asks what is held out.
REPEATED, HELD_OUT = 20, 50
HIDDEN, ANSWER_TOK = 8, 16
FILLER = "Write it as a short function, name its arguments, and say what happens for an empty list. "


def text(number: int) -> str:
    """The prompt with this number, about 250 characters; another number is another text."""
    return f"Task {number}: add up the first {number % 977} numbers of list {number}. {FILLER * (1 + number % 3)}"


def write_files(folder: Path, rows: int) -> int:
    """Training files in three formats and a held-out one.

    Returns:
        Distinct training prompts that are not held out.
    """
    held = [number for number in range(0, rows, HELD_OUT)]
    with (folder / "heldout.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": text(number)}) + "\n" for number in held)
    third = rows // 3
    with (folder / "a.jsonl").open("w") as file:
        file.writelines(_lines(range(third)))
    with gzip.open(folder / "b.jsonl.gz", "wt", compresslevel=1) as file:
        file.writelines(_lines(range(third, 2 * third)))
    names = ("prompt", "domain")
    schema = pyarrow.schema([(name, pyarrow.string()) for name in names])
    with pyarrow.parquet.ParquetWriter(folder / "c.parquet", schema) as writer:
        for start in range(2 * third, rows, 10_000):
            part = [_row(number) for number in range(start, min(rows, start + 10_000))]
            writer.write_table(pyarrow.table({name: [row[name] for row in part] for name in names}, schema=schema))
    return sum(number % HELD_OUT != 0 for number in range(rows) if number % REPEATED != REPEATED - 1)


def _row(number: int) -> dict[str, str]:
    if number % REPEATED == REPEATED - 1:
        return {"prompt": text(number - 1).replace(" ", "  ").upper(), "domain": "code"}
    return {"prompt": text(number), "domain": "code"}


def _lines(numbers: range) -> Iterator[str]:
    return (json.dumps(_row(number)) + "\n" for number in numbers)


def stub_ids(messages: Messages) -> list[int]:
    """A token for every four characters."""
    return list(messages[-1]["content"].encode()[::4])


def stub_answers(work: Worklist) -> Iterator[Answered]:
    """Short answers that depend on the prompt."""
    states = torch.zeros(ANSWER_TOK, HIDDEN)
    for number, (prompt, ids, temperature) in enumerate(work):
        row = {"id": prompt.id, "domain": prompt.domain, "prompt_ids": ids, "answer_ids": ids[-ANSWER_TOK:]}
        yield number, row | {"temperature": temperature, "finish": "length", "reference": False}, states


def run(folder: Path, rows: int, say: Callable[[str], None]) -> None:
    """Every part, in turn."""
    mark = time.perf_counter(), time.process_time()

    def told(what: str, num: int) -> None:
        nonlocal mark
        wall, cpu = time.perf_counter() - mark[0], time.process_time() - mark[1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        say(
            f"{what}: {num} rows in {wall:.1f} s ({num / wall:,.0f} rows/s), {cpu:.1f} s of processor "
            f"({num / cpu:,.0f} rows/s), peak memory {peak:.2f} GiB"
        )
        mark = time.perf_counter(), time.process_time()

    new = write_files(folder, rows)
    told("files written", rows)
    files = tuple(str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"))
    traffic = Traffic(train=files, heldout=str(folder / "heldout.jsonl"), num_train=rows, domain="code")
    prompts = sum(1 for _ in stream_prompts(traffic, seed=0))
    told("traffic: read, checked, de-duplicated, sampled", rows)
    _require(prompts == new, f"{prompts} prompts are left, {new} must be")
    stage, out = Responses(max_new_tok=ANSWER_TOK), folder / "responses"
    out.mkdir()
    for what in (
        "answers: traffic again, work list, shards, manifest",
        "a finished folder: traffic again, rows checked",
    ):
        work, dropped = list_work(stream_prompts(traffic, seed=0), stub_ids, stage, traffic.max_prompt_tok)
        writer = ShardWriter(out, {"stub": True}, stage.shard_rows)
        manifest: dict[str, Any] = take_answers(writer, work, dropped, stub_answers)
        told(what, new)
        _require(manifest["complete"] and manifest["answered"] == new, f"{manifest['answered']} answered of {new}")
    names = sum(shard["rows"] for shard in manifest["shards"])
    say(f"{prompts} prompts of {rows} rows, {names} answers in {len(manifest['shards'])} shards")


def _require(right: bool, words: str) -> None:
    if not right:
        raise ValueError(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every part in a folder that is deleted afterwards."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data_scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="training rows to make")
    parser.add_argument("--dir", type=Path, default=None, help="where the files go (default: among temporary files)")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="data-scale-", dir=args.dir))
    try:
        run(folder, args.rows, lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
