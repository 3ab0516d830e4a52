"""Mathematics prompts: word problems of several steps, and short exercises, in the ways people ask for them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from distill.bundled.split import chooser, is_heldout
from distill.bundled.stories import STORIES, story
from distill.bundled.sums import SUMS
from distill.bundled.words import Words

NUM_TRAIN = 12_000
NUM_HELDOUT = 600
BEFORE = (
    "Solve the problem and show each step.\n\n{}",
    "{}\n\nExplain how you get the answer.",
    "{}\n\nThink step by step and give the final number at the end.",
    "Help me with this exercise: {}",
    "Question: {}",
    "Please solve this: {}",
    "{} Show your working.",
    "{}\n\nFinish with a line 'Answer:' followed by the result.",
)


def math_texts(split: str) -> Iterator[tuple[str, str]]:
    """(prompt, source) of every mathematics prompt.

    The people of held-out problems occur in no training problem; a problem without people belongs to one split by its
    text.
    """
    heldout = split == "heldout"
    rng = chooser(f"math {split}")
    seen: set[str] = set()
    wanted = NUM_HELDOUT if heldout else NUM_TRAIN
    while len(seen) < wanted:
        words = Words(rng, heldout)
        kind, problem = _problem(words)
        personal = any(name in problem for name in (words.who, words.other, words.third))
        if problem not in seen and (personal or is_heldout(f"problem {problem}", 0.2) == heldout):
            seen.add(problem)
            yield _asked(problem, rng), kind


def _problem(w: Words) -> tuple[str, str]:
    draw = w.rng.random()
    if draw < 0.3:
        return "stories", story(w)
    make = w.rng.choice(STORIES if draw < 0.78 else SUMS)
    return make.__name__, make(w)


def _asked(problem: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.12:
        # Choices as large as the numbers of the problem; the right one need not be there.
        near = max(int(number[:6]) for number in re.findall(r"\d+", problem) or ["24"])
        options = rng.sample(range(near // 2, 2 * near + 20), 4)
        lines = "\n".join(f"{letter}) {value}" for letter, value in zip("ABCD", options))
        return f"{problem}\n{lines}\nE) None of these\n\nWhich option is right? Explain."
    return rng.choice(BEFORE).format(problem) if draw < 0.5 else problem
