"""Distinct prompts and a seeded sample of them, out of any number: keys and kept prompts lie on disk."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import replace

from distill.prompt import Prompt
from distill.spill import Spill, key

FENCE = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
MIN_FENCE = 80  # characters; a shorter code block may well stand in two unrelated prompts
SLACK = 1000  # prompts kept beyond twice the sample before the ones that can not be in it are thrown away


class Sieve:
    """Tells prompts that are new from those seen before and those that are held out.

    Two texts count as equal when BLAKE2b gives them the same 256 bits after normalisation (case, white space, Unicode
    form): no two different texts are known to, and among 10^12 of them the odds of one pair are under 10^-53.
    """

    def __init__(self) -> None:
        self._spill = Spill(
            "CREATE TABLE held (key BLOB PRIMARY KEY) WITHOUT ROWID",
            "CREATE TABLE seen (key BLOB PRIMARY KEY) WITHOUT ROWID",
        )
        self._holds = False

    def hold(self, prompt: Prompt) -> None:
        """A prompt to keep out, and every longer block of code in it, under whatever instruction."""
        for part in _keys(prompt):
            self._spill.run("INSERT OR IGNORE INTO held VALUES (?)", part)
        self._holds = True

    def reject(self, prompt: Prompt) -> str:
        """ "duplicate", "also held out", or "" for a prompt that is new; the next of its text is a duplicate."""
        whole, *blocks = _keys(prompt)
        if not self._spill.run("INSERT OR IGNORE INTO seen VALUES (?)", whole).rowcount:
            return "duplicate"
        if self._holds and any(self._held(part) for part in (whole, *blocks)):
            self._spill.run("DELETE FROM seen WHERE key = ?", whole)  # each is counted as held out
            return "also held out"
        return ""

    def _held(self, part: bytes) -> bool:
        return self._spill.run("SELECT 1 FROM held WHERE key = ?", part).fetchone() is not None


class Sample:
    """The `count` prompts with the smallest keyed hash, in that order: seeded, whatever the order of rows.

    Args:
        count: prompts wanted.
        seed: of the hash.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._spill = Spill("CREATE TABLE kept (rank BLOB, id BLOB, prompt TEXT)")
        self._held = 0
        self._last: tuple[bytes, bytes] | None = None  # what comes after it is not in the sample

    def add(self, prompt: Prompt) -> None:
        """Offers a prompt."""
        order = _digest(f"{self.seed}\0{prompt.messages}", 16), key(prompt.id)
        if self._last is not None and order >= self._last:
            return
        self._spill.run("INSERT INTO kept VALUES (?, ?, ?)", *order, to_json(prompt))
        self._held += 1
        if self._held > 2 * self.count + SLACK:
            last = "SELECT rank, id FROM kept ORDER BY rank, id LIMIT 1 OFFSET ?"
            self._last = self._spill.run(last, self.count - 1).fetchone()
            assert self._last is not None
            self._spill.run("DELETE FROM kept WHERE (rank, id) > (?, ?)", *self._last)
            (self._held,) = self._spill.run("SELECT count(*) FROM kept").fetchone()

    def __len__(self) -> int:
        return min(self.count, self._held)

    def __iter__(self) -> Iterator[Prompt]:
        query = "SELECT prompt FROM kept ORDER BY rank, id, rowid LIMIT ?"
        return (from_json(text) for (text,) in self._spill.rows(query, self.count))


def unique_ids(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The same prompts; an id that was there before gets ~2, ~3 and so on."""
    spill = Spill("CREATE TABLE ids (id BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID")

    def taken(name: str) -> bool:
        return not spill.run("INSERT OR IGNORE INTO ids VALUES (?, 1)", key(name)).rowcount

    for prompt in prompts:
        name = prompt.id
        while taken(name):
            spill.run("UPDATE ids SET number = number + 1 WHERE id = ?", key(prompt.id))
            (number,) = spill.run("SELECT number FROM ids WHERE id = ?", key(prompt.id)).fetchone()
            name = f"{prompt.id}~{number}"
        yield prompt if name == prompt.id else replace(prompt, id=name)


def to_json(prompt: Prompt) -> str:
    """A prompt as text; half characters survive, since all is ASCII."""
    return json.dumps([prompt.id, prompt.domain, prompt.messages, prompt.reference, prompt.source])


def from_json(text: str) -> Prompt:
    """The prompt of `to_json`."""
    name, domain, messages, reference, source = json.loads(text)
    return Prompt(name, domain, tuple(messages), reference, source)


def _keys(prompt: Prompt) -> list[bytes]:
    """Digests of the normalised text (system turns left out) and of each longer block of code in it."""
    text = "\n".join(turn["content"] for turn in prompt.messages if turn["role"] != "system")
    blocks = [block for block in FENCE.findall(text) if len(block) >= MIN_FENCE]
    return [_digest(_normal(part), 32) for part in (text, *blocks)]


def _normal(text: str) -> str:
    # Punctuation stays: 3 + 4 and 3 - 4 are two problems.
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(key(text), digest_size=size).digest()
