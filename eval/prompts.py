"""Which held-out prompts are measured: by context group, as many as the recipe asks for, and what is left out and why.

Our own engine and a running server are asked the same ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.prompt import Prompt
from distill.recipe import Recipe
from distill.schema_eval import GROUPS, Eval, group_of
from distill.tokens import encode_prompt
from distill.traffic import load_prompts
from eval.cut import cut_middle

log = logging.getLogger(__name__)

# Prompts kept back for choosing a tree, and ids of prompts that are named.
NUM_SPARE, MAX_NAMED = 6, 20


@dataclass(frozen=True)
class Taken:
    """A prompt to measure with.

    Attributes:
        prompt: its messages are what is asked, cut where it was cut.
        group: its context class.
        ids: its tokens.
    """

    prompt: Prompt
    group: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """What is measured of the held-out prompts, and what is not.

    Attributes:
        cells: by domain and group, in the order of the traffic.
        spare: further prompts of the domain that the draft is for.
        left_out: by domain, prompts that do not fit: their number, why, and the first ids.
        cut: the same of prompts in `cells` that were cut to fit.
        not_asked: by domain and group, the number of prompts of groups that `eval.num_requests` does not name.
    """

    cells: dict[tuple[str, str], list[Taken]] = field(default_factory=dict)
    spare: list[Taken] = field(default_factory=list)
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_asked: dict[str, Counter[str]] = field(default_factory=dict)

    def num(self, domain: str, group: str) -> int:
        """Prompts of a cell so far."""
        return len(self.cells.get((domain, group), ()))

    def told(self) -> dict[str, Any]:
        """What the settings of a report say of prompts that are not measured, or not whole."""
        return {"left_out": self.left_out, "cut": self.cut, "not_asked": self.not_asked}


def limit_of(recipe: Recipe, positions: int | None) -> tuple[int, str]:
    """Tokens that a prompt may have, and what says so.

    Args:
        recipe: its traffic and eval stages.
        positions: that the target has; None is no limit.
    """
    longest = recipe.traffic.max_prompt_tok
    room = longest if positions is None else positions - recipe.eval.max_new_tok
    return min(longest, room), (
        "traffic.max_prompt_tok" if longest <= room else "the target's positions less eval.max_new_tok"
    )


def choose_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, positions: int | None = None) -> Choice:
    """The first `eval.num_requests` held-out prompts of each domain and group that fit.

    Args:
        recipe: its traffic and eval stages.
        tokenizer: the target's.
        positions: that the target has; None is no limit.

    Raises:
        ValueError: none is left, or an answer leaves no room for a prompt.
    """
    stage = recipe.eval
    limit, why = limit_of(recipe, positions)
    if limit < 1:
        raise ValueError(
            f"eval.max_new_tok = {stage.max_new_tok} leaves no room for a prompt: the target has {positions} "
            "positions; lower it"
        )
    choice = Choice()
    for prompt in load_prompts(recipe.traffic, "heldout", recipe.seed, stage.domains):
        ids = encode_prompt(tokenizer, prompt.messages, recipe.traffic.system)
        long = len(ids) > limit
        if long and not stage.cut_long:
            _count(choice.left_out, prompt, limit, why)
            continue
        group = group_of(min(len(ids), limit))
        if long and choice.num(prompt.domain, group) < stage.num_of(group):  # else cutting takes time for nothing
            shorter = cut_middle(tokenizer, prompt.messages, recipe.traffic.system, limit)
            if shorter is None:
                _count(choice.left_out, prompt, limit, f"{why}; what is not the last message alone is as long")
                continue
            prompt, ids = replace(prompt, messages=shorter[0]), shorter[1]
            group = group_of(len(ids))  # a cut may end a few tokens below the limit, and a group there
        if not stage.num_of(group):
            choice.not_asked.setdefault(prompt.domain, Counter())[group] += 1
            continue
        full = choice.num(prompt.domain, group) >= stage.num_of(group)
        taken = Taken(prompt, group, tuple(ids))
        if not full:
            choice.cells.setdefault((prompt.domain, group), []).append(taken)
            if long:
                _count(choice.cut, prompt, limit, why)
        elif not long and len(choice.spare) < NUM_SPARE and prompt.domain in (recipe.traffic.domain, stage.domains[0]):
            choice.spare.append(taken)
    _say(choice)
    _say_short(choice, stage, recipe)
    if not choice.cells:
        domains = ", ".join(stage.domains)
        if choice.not_asked:
            raise ValueError(
                f"no held-out prompt of {domains} is of a group that eval.num_requests = {stage.num_requests} names; "
                "name another, or give other prompts (traffic.heldout)"
            )
        has, cut = ("can be cut to", "") if stage.cut_long else ("has", "let prompts be cut (eval.cut_long=true), ")
        raise ValueError(
            f"no held-out prompt of {domains} {has} {limit} tokens or less ({why}); raise it, {cut}"
            "or give other prompts (traffic.heldout)"
        )
    return choice


def _count(told: dict[str, dict[str, Any]], prompt: Prompt, limit: int, why: str) -> None:
    """One more prompt of a domain was over the limit; the first ones are named."""
    entry = told.setdefault(prompt.domain, {"num": 0, "limit_tok": limit, "limit": why, "ids": []})
    entry["num"] += 1
    entry["ids"] += [prompt.id] if len(entry["ids"]) < MAX_NAMED else []


def _say(choice: Choice) -> None:
    """What is measured and what is not, in the log."""
    for domain, entry in choice.left_out.items():
        log.warning("%s: %d held-out prompts left out, over %d tokens (%s): %s", domain, *_named(entry))
    for domain, entry in choice.cut.items():
        log.warning("%s: %d held-out prompts cut in the middle to %d tokens (%s): %s", domain, *_named(entry))
    for domain, groups in choice.not_asked.items():
        for group, num in groups.items():
            log.warning("%s, %s: %d held-out prompts left out: eval.num_requests does not name it", domain, group, num)
    for (domain, group), cell in choice.cells.items():
        log.info("%s, %s: %d held-out prompts", domain, group, len(cell))


def _say_short(choice: Choice, stage: Eval, recipe: Recipe) -> None:
    """Groups, or where none is named domains, of which fewer are there than are asked for."""
    for domain in stage.domains:
        if not isinstance(stage.num_requests, dict):
            num = sum(choice.num(domain, group) for group, _, _ in GROUPS)
            if num < stage.num_requests:
                few = f", fewer than eval.min_requests = {stage.min_requests}" if num < stage.min_requests else ""
                log.warning(
                    "%s: %d of %d prompts of eval.num_requests are there%s", domain, num, stage.num_requests, few
                )
            continue
        for group, low, _ in GROUPS:
            asked, num = stage.num_of(group), choice.num(domain, group)
            if num < asked:
                log.warning(
                    "%s, %s: %d of %d prompts of eval.num_requests are there; this group begins at %d tokens, "
                    "traffic.num_heldout = %d prompts a domain are read, of at most traffic.max_prompt_tok = %d tokens",
                    *(domain, group, num, asked, low, recipe.traffic.num_heldout, recipe.traffic.max_prompt_tok),
                )


def _named(entry: dict[str, Any]) -> tuple[int, int, str, str]:
    ids = ", ".join([*entry["ids"], *(["..."] if entry["num"] > len(entry["ids"]) else [])])
    return entry["num"], entry["limit_tok"], entry["limit"], ids
