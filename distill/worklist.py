"""Prompts to ask, shortest first; they lie on disk, so that millions of them take no memory."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator

from distill.prompt import Prompt
from distill.sample import from_json, to_json
from distill.spill import Spill, key

Work = tuple[Prompt, list[int], float]  # a prompt, its ids, its temperature


class Worklist:
    """Prompts with their token ids and temperatures, and which of them are settled.

    The order is that of the prompts' lengths, equal ones as they were added: rows of a batch that are about as long
    read about as much KV. It depends on the prompts alone, so a resumption meets the rest in the same order.

    Attributes:
        longest: tokens of the longest prompt added, 0 without any.
    """

    def __init__(self) -> None:
        self._spill = Spill(
            "CREATE TABLE work (number INTEGER PRIMARY KEY, id BLOB UNIQUE, length INTEGER, prompt TEXT, ids BLOB, "
            "temperature REAL)",
            "CREATE TABLE settled (id BLOB PRIMARY KEY) WITHOUT ROWID",
        )
        self._length = self.longest = 0

    def add(self, prompt: Prompt, ids: list[int], temperature: float) -> None:
        """Adds a prompt.

        Raises:
            ValueError: another one has its id.
        """
        packed = array("q", ids).tobytes()
        try:
            self._spill.run(
                "INSERT INTO work (id, length, prompt, ids, temperature) VALUES (?, ?, ?, ?, ?)",
                *(key(prompt.id), len(ids), to_json(prompt), packed, temperature),
            )
        except sqlite3.IntegrityError as error:
            raise ValueError(f"two prompts have the id {prompt.id!r}; ids must differ") from error
        self._length += 1
        self.longest = max(self.longest, len(ids))

    def settle(self, name: str) -> None:
        """Takes the prompt with this id, if there is one, out of those to ask."""
        self._spill.run("INSERT OR IGNORE INTO settled VALUES (?)", key(name))

    def __len__(self) -> int:
        """Prompts added, settled ones too."""
        return self._length

    def __iter__(self) -> Iterator[Work]:
        """Those that are not settled when the iteration starts."""
        query = (
            "SELECT prompt, ids, temperature FROM work WHERE id NOT IN (SELECT id FROM settled) ORDER BY length, number"
        )
        for prompt, packed, temperature in self._spill.rows(query):
            ids = array("q")
            ids.frombytes(packed)
            yield from_json(prompt), ids.tolist(), temperature
