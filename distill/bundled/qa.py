"""Question prompts: short questions on widely known facts, and questions over passages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

from distill.bundled import facts_culture as culture
from distill.bundled import facts_science as science
from distill.bundled import facts_world as world
from distill.bundled.library import passages
from distill.bundled.passages import SUBJECTS, passage
from distill.bundled.questions import QUESTIONS
from distill.bundled.split import chooser, is_heldout

PER_PACKAGE = 40  # passages of one library package
TABLES = {
    "country": world.COUNTRIES, "river": world.RIVERS, "sight": world.SIGHTS, "food": world.FOODS,
    "element": science.ELEMENTS, "animal": science.ANIMALS, "invention": science.INVENTIONS,
    "book": culture.BOOKS, "person": culture.PEOPLE, "event": culture.EVENTS,
}  # fmt: skip
LISTS = {
    "body": science.BODY, "idea": science.IDEAS, "pair": science.PAIRS, "game": culture.GAMES,
    "howto": culture.HOWTO, "writing": culture.WRITING,
}  # fmt: skip
PLAIN = ("{}", "{}", "{}", "{}", "{}?", "Question: {}", "Quick question: {}", "{} Answer in one sentence.",
         "{} Give a short answer.", "{} Please explain.", "Can you tell me {}", "I would like to know: {}")  # fmt: skip
WITH_PASSAGE = (
    "Use the text below to answer the question.\n\n{passage}\n\nQuestion: {question}",
    "{passage}\n\n{question}",
    "Passage:\n{passage}\n\nQuestion: {question}\nAnswer in one or two sentences.",
    "Here is a text about {title}:\n\n{passage}\n\nAccording to it, {lower}",
    "{passage}\n\nBased on the text above, {lower}",
    "Question: {question}\n\nContext:\n{passage}\n\nAnswer with the help of the context.",
)
ON_MODULE = (
    "What is this module for?", "What does the module offer to a programmer?", "Summarise the text in two sentences.",
    "Which tasks does it help with?", "When would somebody use it?", "What are the main parts of the module?",
    "List the most important points of the text.",
)  # fmt: skip
ON_FUNCTION = (
    "What does {it} do?", "What does {it} return?", "Which arguments does {it} take?", "When would you call {it}?",
    "What happens when something goes wrong in {it}?", "Explain in your own words what {it} is for.",
    "Are there any special cases in {it}?", "What should a caller of {it} keep in mind?",
)  # fmt: skip
NUM_COMPOSED = {"train": 1800, "heldout": 180}


def qa_texts(split: str) -> Iterator[tuple[str, str]]:
    """(prompt, source) of every question; a fact's subject or a library module belongs to one split alone."""
    heldout = split == "heldout"
    for kind, fields in subjects(heldout):
        rng = chooser(f"question {kind} {fields[0]}")
        forms = QUESTIONS[kind]
        for phrasings in forms:
            # The short tables would else be too few: some facts are asked in two ways.
            for phrasing in rng.sample(phrasings, min(len(phrasings), 2 if rng.random() < 0.35 else 1)):
                yield _asked(_fill(phrasing, fields), rng), f"{kind} questions"
    yield from _composed(split)
    counts: Counter[str] = Counter()
    for module, title, text in passages():
        package = module.split(".")[0].lstrip("_")
        counts[package] += 1
        if is_heldout(f"module {package}") == heldout and counts[package] <= PER_PACKAGE:
            rng = chooser(f"passage {title} {text}")
            _, _, kind, name = title.split()  # "the Python function os.walk"
            question = rng.choice(ON_MODULE if kind == "module" else ON_FUNCTION)
            question = question.format(it=rng.choice((f"this {kind}", f"`{name}`")))
            yield _over(text, title, question, rng), f"Python standard library, {module}"


def subjects(heldout: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(kind, fields) of every subject of a split."""
    for kind, table in TABLES.items():
        for line in table.strip().splitlines():
            if is_heldout(f"subject {kind} {line.split('|')[0]}", 0.12) == heldout:
                yield kind, tuple(line.split("|"))
    for kind, text in LISTS.items():
        for item in text.strip().replace("\n", "|").split("|"):
            if is_heldout(f"subject {kind} {item}", 0.12) == heldout:
                yield kind, (item,)


def _composed(split: str) -> Iterator[tuple[str, str]]:
    """Short passages written from the tables, each with a question that they answer."""
    rng = chooser(f"composed {split}")
    by_kind: dict[str, list[tuple[str, ...]]] = {}
    for kind, fields in subjects(split == "heldout"):
        if kind in SUBJECTS:
            by_kind.setdefault(kind, []).append(fields)
    seen: set[str] = set()
    while len(seen) < NUM_COMPOSED[split]:
        kind = rng.choice(sorted(by_kind))
        text, title, question = passage(kind, by_kind[kind], rng)
        prompt = _over(text, title, question, rng)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt, f"{kind} passages"


def _fill(phrasing: str, fields: tuple[str, ...]) -> str:
    name = fields[0]
    return phrasing.format(*fields, bare=name.removeprefix("the "), Name=name[0].upper() + name[1:])


def _asked(question: str, rng: random.Random) -> str:
    """In the carelessness of a search box, or with an instruction."""
    frame = rng.choice(PLAIN)
    if frame.startswith(("Can you", "I would")):
        return frame.format(question[0].lower() + question[1:].rstrip("?.")) + ("?" if frame.startswith("Can") else "")
    draw = rng.random()
    change: Callable[[str], str] = str.lower if draw < 0.4 else str
    question = change(question)
    if frame in ("{}", "{}?") and draw < 0.15:
        return question.rstrip("?.")
    return frame.replace("?", "").format(question)


def _over(text: str, title: str, question: str, rng: random.Random) -> str:
    frame = rng.choice(WITH_PASSAGE)
    return frame.format(passage=text, title=title, question=question, lower=question[0].lower() + question[1:])
