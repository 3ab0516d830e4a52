"""Short passages written from the tables, with a question that the passage answers."""

# ruff: noqa: E501 (templates read better unbroken)

from __future__ import annotations

import random

# Sentences about a subject ({0} is its name, {Name} with a capital; {1} and on are its other fields).
SUBJECTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "country": (
        ("{Name} is a country in {2}.", "{Name} lies in {2}."),
        ("Its capital is {1}.", "The government sits in {1}, the capital.", "{1} is the capital city."),
        ("People pay with the {3}.", "The currency is the {3}."),
        ("The language of the country is {4}.", "Most signs and newspapers are in {4}.", "Children learn {4} at school."),
    ),
    "river": (
        ("The {0} is a river in {1}.", "In {1} flows the {0}."),
        ("It ends in {2}.", "After a long way it reaches {2}."),
        ("Farmers use its water for their fields.", "Boats carry goods on it.", "Many towns were founded on its banks."),
    ),
    "element": (
        ("{Name} is a chemical element with the symbol {1}.", "The symbol {1} stands for the element {0}."),
        ("Its atomic number is {2}.", "An atom of it has {2} protons."),
        ("It is a {3}.", "Under normal conditions it is a {3}."),
        ("It is used for {4}.", "Among its uses are {4}.", "Industry needs it for {4}."),
    ),
    "animal": (
        ("The {0} is a {1}.", "Among the best known {1}s is the {0}."),
        ("It lives in {2}.", "Its home is {2}.", "It is found in {2}."),
        ("It feeds on {3}.", "Its food is {3}.", "It eats {3}."),
    ),
    "invention": (
        ("The {0} goes back to {1}.", "We owe the {0} to {1}."),
        ("It dates from {2}.", "That was in {2}.", "The year usually given is {2}."),
        ("Others had worked on similar ideas before.", "At first many people doubted its value.", "It soon spread to other countries."),
    ),
    "book": (
        ("{Name} is a {3} by {1}.", "{1} is the author of {0}, a {3}."),
        ("It appeared in {2}.", "Readers first saw it in {2}."),
        ("It has been translated into many languages.", "It is still read in schools today.", "Several films are based on it."),
    ),
    "person": (
        ("{Name} was a {3}, born in {2} in {1}.", "Born in {2} in {1}, {0} became a {3}."),
        ("The name is connected with {4} above all.", "What made the name famous was {4}.", "Best known is {4}."),
        ("Several biographies have been written.", "Schools and streets carry the name.", "Not everybody agreed at the time."),
    ),
    "event": (
        ("The {0} dates from {1}.", "In {1} came the {0}."),
        ("It took place in {2}.", "The place was {2}."),
        ("Historians still argue about its causes.", "Newspapers and letters of the time tell of it.", "Its effects were felt for a long time."),
    ),
}  # fmt: skip
# Questions that the sentences above answer.
ANSWERED: dict[str, tuple[str, ...]] = {
    "country": ("What is the capital of {0}?", "Which currency is used in {0}?", "What language is spoken in {0}?",
                "Where does {0} lie?"),
    "river": ("Where does the {0} end?", "In which region is the {0}?", "Into what does the {0} flow?"),
    "element": ("What is the symbol of {0}?", "What is the atomic number of {0}?", "What is {0} used for?",
                "What kind of substance is {0}?"),
    "animal": ("What does the {0} eat?", "Where does the {0} live?", "To which group of animals does the {0} belong?"),
    "invention": ("Who stands behind the {0}?", "When was the {0} invented or found?", "To whom do we owe the {0}?"),
    "book": ("Who wrote {0}?", "When did {0} appear?", "What kind of work is {0}?"),
    "person": ("Where was {0} born?", "When was {0} born?", "What was {0} known for?", "What was the profession of {0}?"),
    "event": ("When was the {0}?", "Where did the {0} take place?"),
}  # fmt: skip


def passage(kind: str, rows: list[tuple[str, ...]], rng: random.Random) -> tuple[str, str, str]:
    """Writes about one to four subjects of a kind and asks about one of them.

    Args:
        kind: a key of SUBJECTS.
        rows: the subjects' fields.
        rng: chooses subjects, sentences and the question.

    Returns:
        The passage, what it is about, and the question.
    """
    chosen = rng.sample(rows, min(len(rows), rng.randint(1, 4)))
    paragraphs = []
    for fields in chosen:
        first, *rest = SUBJECTS[kind]
        sentences = [rng.choice(first), *(rng.choice(options) for options in rng.sample(rest, len(rest)))]
        paragraphs.append(" ".join(_write(sentence, fields) for sentence in sentences))
    asked = rng.choice(chosen)
    titles = " and ".join(
        _write("the {0}" if kind in ("river", "animal", "event") else "{0}", row) for row in chosen[:2]
    )
    return rng.choice((" ", "\n\n")).join(paragraphs), titles, _write(rng.choice(ANSWERED[kind]), asked)


def _write(sentence: str, fields: tuple[str, ...]) -> str:
    name = fields[0]
    return sentence.format(*fields, Name=name[0].upper() + name[1:])
