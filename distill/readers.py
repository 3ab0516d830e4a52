"""Rows of the user's files, one at a time: JSONL, JSONL.gz, parquet, or a hub data set. Every row knows its place."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.fields import matches
from distill.schema import Traffic

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
GZIP_MAGIC = b"\x1f\x8b"


class TrafficError(ValueError):
    """Prompts that cannot be read or used."""


@dataclass(frozen=True)
class Row:
    """One record.

    Attributes:
        values: its columns.
        file: short name of the file or data set.
        number: physical line (JSONL) or row (others), from 1.
        place: for messages, such as `prompts.jsonl:12`.
    """

    values: dict[str, Any]
    file: str
    number: int
    place: str

    @property
    def name(self) -> str:
        """An id for a row that has none."""
        return f"{self.file}:{self.number}"


def is_hub_id(source: str) -> bool:
    """Names a source no file here, but may it be a data set of the hub?"""
    return bool(HUB_ID.fullmatch(source)) and not source.endswith(SUFFIXES) and not matches(source)


def read_rows(source: str, split: str, traffic: Traffic, counts: Counter[str]) -> Iterator[Row]:
    """Streams the rows of a path, a glob or a hub data set.

    Args:
        source: what the recipe names.
        split: of a hub data set.
        traffic: column names, and what to do with a broken line (skipped ones are counted as "bad row").
        counts: gets the number of skipped lines.

    Raises:
        TrafficError: nothing there, an unknown file type, or a broken line.
    """
    files = matches(source)
    if not files:
        if is_hub_id(source):
            yield from _hub(source, split, traffic)
            return
        raise TrafficError(f"{source}: no such file; give a path, a glob ('*' works) or a hub data set id (owner/name)")
    for file in files:
        if file.is_dir():
            raise TrafficError(f"{file} is a folder; name the files in it, for example {file}/*.jsonl")
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _jsonl(file, traffic.on_bad_line == "skip", counts)
        elif file.suffix == ".parquet":
            yield from _parquet(file, traffic)
        else:
            raise TrafficError(f"{file}: unknown file type; readable are {', '.join(SUFFIXES)}")


def _jsonl(file: Path, skip: bool, counts: Counter[str]) -> Iterator[Row]:
    number = 0
    try:
        # Bytes, so that only a real newline ends a line; text mode would also split at some Unicode separators.
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if number == 1 and line.startswith(GZIP_MAGIC):
                    raise TrafficError(f"{file}: gzip data; give it a name that ends in .jsonl.gz, or unpack it")
                if not line.strip():
                    continue
                try:
                    values = json.loads(str(line, "utf-8"))  # json guesses the encoding of bytes, line by line
                    if not isinstance(values, dict):
                        raise ValueError(f"a JSON object is expected, this is a {type(values).__name__}")
                except (ValueError, RecursionError) as error:
                    if not skip:
                        raise TrafficError(
                            f"{file}:{number}: broken line: {error}. Mend it, or leave such lines out and have them "
                            "counted: traffic.on_bad_line=skip"
                        ) from error
                    counts["read"] += 1
                    counts["bad row"] += 1
                    continue
                yield Row(values, file.name, number, f"{file}:{number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if isinstance(error, gzip.BadGzipFile) and not number:
            raise TrafficError(f"{file}: no gzip file, though its name ends in .gz; rename or compress it") from error
        raise TrafficError(f"{file}: damaged gzip data after line {number}: {error}; fetch the file again") from error
    except OSError as error:
        raise TrafficError(f"{file}: cannot be read: {error.strerror or error}") from error


def _parquet(file: Path, traffic: Traffic) -> Iterator[Row]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        table = ParquetFile(file)
        present = table.schema_arrow.names
        columns = [name for name in _columns(traffic) if name in present]
        if not {traffic.messages_column, traffic.prompt_column} & set(columns):
            raise TrafficError(_no_prompt(str(file), present, traffic))
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            for values in batch.to_pylist():
                number += 1
                yield Row(values, file.name, number, f"{file}, row {number}")
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise TrafficError(f"{file}: not readable as parquet after row {number}: {reason}") from error


def _hub(name: str, split: str, traffic: Traffic) -> Iterator[Row]:
    import datasets

    try:
        data = datasets.load_dataset(name, split=split, streaming=True)
        present = data.column_names
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TrafficError(
            f"{name}: no such file, and no readable hub data set with split {split!r}: {reason}. "
            "Give a path, or set traffic.split_train / traffic.split_heldout"
        ) from error
    if present is not None:
        if not {traffic.messages_column, traffic.prompt_column} & set(present):
            raise TrafficError(_no_prompt(f"{name} [{split}]", present, traffic))
        data = data.select_columns([column for column in _columns(traffic) if column in present])
    for number, values in enumerate(data, 1):
        yield Row(values, name, number, f"{name} [{split}], row {number}")


def _columns(traffic: Traffic) -> tuple[str, ...]:
    """Only these are ever read, so a column of changing type that nobody uses does no harm."""
    own = (traffic.messages_column, traffic.prompt_column, traffic.response_column)
    return tuple(dict.fromkeys((*own, "id", "domain", "source")))


def _no_prompt(where: str, present: list[str], traffic: Traffic) -> str:
    return (
        f"{where}: neither column {traffic.messages_column!r} nor {traffic.prompt_column!r}; "
        f"it has {', '.join(map(repr, present))}. Name yours: traffic.prompt_column=NAME"
    )
