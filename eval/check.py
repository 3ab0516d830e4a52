"""eval.run --check: what would stop an evaluation or leave it with fewer requests, found before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from distill.checkpoint import whole_draft
from distill.look import CheckError, find_config
from distill.models import load_tokenizer, resolve
from distill.recipe import Recipe
from eval.prompts import choose_prompts

log = logging.getLogger(__name__)


def check(recipe: Recipe, source: str, drafts: Mapping[str, Path]) -> None:
    """Checks the drafts' files and reads the held-out prompts; the log says how many there are of each kind.

    A draft shares the target's tokenizer, so prompts are counted with the first draft's and no target is fetched.

    Args:
        recipe: the resolved recipe.
        source: its file, for messages.
        drafts: folders by name.

    Raises:
        ValueError: a draft, the target's folder or the held-out prompts can not be used.
    """
    for path in drafts.values():
        resolve(str(path))
        whole_draft(path)
    problems: list[str] = []
    told: list[str] = []
    target = find_config(recipe.target.model, "target.model", problems, told)
    if problems:
        raise CheckError("\n".join([f"{source}: a reason not to start", *(f"  {text}" for text in problems)]))
    for text in told:
        log.info("%s", text)
    tokenizer = load_tokenizer(str(next(iter(drafts.values()))))
    choose_prompts(recipe, tokenizer, (target or {}).get("max_position_embeddings"))
