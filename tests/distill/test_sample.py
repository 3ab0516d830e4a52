"""Distinct prompts and their sample: exact, seeded, the same on disk as in memory would be."""

from __future__ import annotations

import hashlib
import heapq
import random

import pytest

from distill import sample as module
from distill.prompt import Prompt
from distill.sample import Sample, Sieve, from_json, to_json, unique_ids


def prompt(text: str, name: str = "", **more: str) -> Prompt:
    return Prompt(name or text, "math", ({"role": "user", "content": text},), more.get("reference"), "t")


def test_the_sample_is_that_of_a_sort_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was thrown away on the way: ties of one text go by id, then by place."""
    monkeypatch.setattr(module, "SLACK", 3)
    chance = random.Random(0)
    asked = [prompt(f"text {chance.randrange(300)}", f"id {chance.randrange(40)}") for _ in range(1000)]

    def order(one: Prompt) -> tuple[bytes, str]:
        return hashlib.blake2b(f"5\0{one.messages}".encode(), digest_size=16).digest(), one.id

    for count in (1, 7, 100, 999, 2000):
        sample = Sample(count, 5)
        for one in asked:
            sample.add(one)
        want = heapq.nsmallest(count, asked, key=order)
        assert list(sample) == want and len(sample) == len(want)
        assert list(sample) == want  # it can be read again


def test_a_text_is_new_once_and_held_out_texts_and_code_never_are() -> None:
    block = "```python\n" + "x = 1  # a line of code that is long enough to be looked at\n" * 2 + "```"
    sieve = Sieve()
    sieve.hold(prompt(f"Explain.\n{block}"))
    sieve.hold(prompt("What is 2 + 2?"))
    told = [
        sieve.reject(prompt(text))
        for text in (
            "what is\n 2 + 2?", "what is 2 - 2?", "WHAT IS 2 - 2?", f"Mend it.\n{block}", f"Mend it.\n{block}", "ﬁne",
            "fine",
        )
    ]  # fmt: skip
    assert told == ["also held out", "", "duplicate", "also held out", "also held out", "", "duplicate"]


def test_no_two_texts_are_one_among_many() -> None:
    """Half of 40,000 texts are there twice: as many are new as a set of whole texts holds."""
    chance, sieve = random.Random(1), Sieve()
    texts = [f"{chance.randrange(30_000)} apples" for _ in range(40_000)]
    assert sum(not sieve.reject(prompt(text)) for text in texts) == len(set(texts))


def test_ids_are_made_unique_even_where_the_new_name_is_taken() -> None:
    names = ["a", "a", "a~2", "a", "b", "a~2", "\ud800", "\ud800"]
    found = [one.id for one in unique_ids(prompt("x", name) for name in names)]
    assert found == ["a", "a~2", "a~2~2", "a~3", "b", "a~2~3", "\ud800", "\ud800~2"]


@pytest.mark.parametrize("text", ["a", "\u2028 é 🦊", "half \ud83e"])
def test_a_prompt_survives_its_text(text: str) -> None:
    messages = ({"role": "system", "content": text}, {"role": "user", "content": "x"})
    for one in (Prompt(text, text, messages, text, text), Prompt("a", "b", messages, None, "c")):
        assert from_json(to_json(one)) == one
