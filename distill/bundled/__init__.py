"""Prompts that need no network: made at run time from the installed standard library, templates and tables.

What a split holds is fixed, so that a draft trained with one seed can be measured with another; the seed only samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

from distill.prompt import Prompt


@cache
def bundled_prompts(domain: str, split: Literal["train", "heldout"]) -> tuple[Prompt, ...]:
    """All bundled prompts of a domain and split.

    Args:
        domain: code, math or qa.
        split: the two share no source module (code, passages), no task (code), no fact (qa) and no problem (math).

    Raises:
        ValueError: another domain.
    """
    return tuple(
        Prompt(
            id=f"bundled-{domain}-{split}-{number:05d}",
            domain=domain,
            messages=({"role": "user", "content": text},),
            reference=None,
            source=source,
        )
        for number, (text, source) in enumerate(_texts(domain, split))
    )


def _texts(domain: str, split: str) -> Iterator[tuple[str, str]]:
    # Each generator is imported only when it is asked for: the tables and the library scan take a while.
    if domain == "code":
        from distill.bundled.code import code_texts

        return code_texts(split)
    if domain == "math":
        from distill.bundled.math import math_texts

        return math_texts(split)
    if domain == "qa":
        from distill.bundled.qa import qa_texts

        return qa_texts(split)
    raise ValueError(f"no bundled prompts for domain {domain!r}; there are code, math, qa")
