"""Recipes: YAML text -> overrides -> JSON -> frozen stages, with every mistake in one message."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from distill.auto import settle
from distill.fields import BUNDLED_DOMAINS, Stage
from distill.mistakes import Key, brief, dotted, explain, line
from distill.schema import (
    Distill,
    Eval,
    Recipe,
    Responses,
    Target,
    Track,
    Traffic,
    TrainerStage,
)
from distill.schema_draft import Draft, Head
from distill.schema_rounds import Round, round_steps

__all__ = [
    "BUNDLED_DOMAINS",
    "Distill",
    "Draft",
    "Eval",
    "Head",
    "Recipe",
    "RecipeError",
    "Responses",
    "Round",
    "Stage",
    "Target",
    "Track",
    "Traffic",
    "TrainerStage",
    "dump",
    "load_recipe",
    "recipe_hash",
    "rounds_of",
]


MOST_LINES = 20  # of a message; a person mends these first
HALF = re.compile("[\ud800-\udfff]")  # of a pair of surrogates; UTF-8 and JSON hold whole characters alone
BAD_KEY = "a list or mapping is used as a key; keys are plain names"


class RecipeError(ValueError):
    """A recipe that cannot be used; the message lists every mistake.

    Attributes:
        problems: one line for each mistake; a message shows the first 20.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        count = f"{len(problems)} mistakes" if len(problems) > 1 else "a mistake"
        lines = [brief(problem, 900) for problem in problems[:MOST_LINES]]
        if more := len(problems) - len(lines):
            lines.append(f"and {more} more")
        super().__init__("\n".join([f"{source}: {count} in the recipe", *(f"  {text}" for text in lines)]))
        self.problems = tuple(problems)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and checks all of it; nothing but the recipe file is opened.

    Args:
        path: YAML 1.2 (or JSON) file.
        overrides: `dotted.key=value`; the value is YAML and replaces what stood there, mappings included.

    Returns:
        The frozen recipe with every default filled in, and what `auto` stands for on this machine.

    Raises:
        RecipeError: naming each wrong key with its place, value, allowed range and nearest valid name.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [f"cannot be read: {getattr(error, 'strerror', None) or error}"]) from error
    problems: list[str] = []
    places: dict[Key, str] = {}
    data = _read(text, str(path), places, problems)
    if not isinstance(data, dict):
        raise RecipeError(str(path), problems or ["is empty or no mapping of keys to values"])
    for override in overrides:
        _override(data, override, places, problems)
    problems += [line(key, places, message) for key, message in _not_json(data)]
    if problems:
        # What could not be read as data would only bring more, misleading errors.
        raise RecipeError(str(path), problems)
    try:
        return settle(Recipe.model_validate_json(json.dumps(data)))
    except ValidationError as error:
        raise RecipeError(str(path), explain(error, Recipe.model_json_schema(), data, places)) from error


def dump(recipe: Recipe) -> str:
    """The resolved recipe as JSON text, which `load_recipe` reads back."""
    return recipe.model_dump_json(indent=2)


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 (hex) of the resolved recipe: equal for equal settings, however they were written."""
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def rounds_of(recipe: Recipe) -> list[Recipe]:
    """The recipe of every round, and last that of the draft itself: each with its own shape and number of steps."""
    steps = round_steps(recipe.draft.rounds, recipe.distill.max_steps)
    drafts = [round_draft(recipe.draft, one) for one in recipe.draft.rounds]
    recipes = []
    for draft, num in zip([*drafts, recipe.draft], steps, strict=True):
        distill = {"max_steps": num} | ({} if draft is recipe.draft else {"replay": None})
        stage = recipe.distill.model_copy(update=distill)
        recipes.append(recipe.model_copy(update={"draft": draft, "distill": stage}))
    return recipes


def round_draft(draft: Draft, one: Round) -> Draft:
    """A round as a draft stage: every weight is trained, with the whole head or the draft's own shortlist."""
    shape = one.model_dump(exclude={"frac"})
    head = draft.head if draft.head.kind == "shortlist" else Head()
    free = {"rounds": (), "bridge": False, "untie_head": False, "lora": None, "head": head, "size_frac": (0.0, 1.0)}
    return draft.model_copy(update=shape | free | {"dtype": "float32"})


def longest_prompt(recipe: Recipe, positions: int | None) -> int:
    """Tokens of a prompt beyond which it is not answered: no training row or no model would hold its answer too.

    Args:
        recipe: its traffic, responses and distill stages count.
        positions: that the target has; None is no limit.
    """
    room = [recipe.traffic.max_prompt_tok, recipe.distill.max_length - 1]
    return min(room if positions is None else [*room, positions - recipe.responses.max_new_tok])


def doubts(recipe: Recipe) -> list[str]:
    """What is allowed and yet seldom meant, a line each."""
    stage, served, written = recipe.distill, recipe.eval.temperature, recipe.responses.temperatures
    found = []
    if stage.objective is not None:
        meant = 0.0 if stage.objective == "greedy" else stage.temperature
        if meant != served:
            found.append(
                f"distill.objective = {stage.objective!r} trains for temperature {meant:g}, but eval.temperature = "
                f"{served:g} chooses the draft and measures it; set them alike"
            )
    if recipe.responses.source == "target" and not min(written) <= served <= max(written):
        found.append(
            f"responses.temperatures = {list(written)}: the draft is measured at eval.temperature = {served:g}, of "
            "which no answer is written; add it"
        )
    drafts = (recipe.draft, *(recipe.draft.candidates or ()))
    if stage.outside_rows == 0 and any(draft.head.kind == "shortlist" for draft in drafts):
        found.append(
            "distill.outside_rows = 0 trains the shortlist's rows alone: servers that read the whole head get a worse "
            "draft; leave it out"
        )
    return found


def _read(text: str, source: str, places: dict[Key, str], problems: list[str]) -> Any:
    """Parses YAML; fills `places` with the line of every key and `problems` with duplicates and syntax errors."""
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = True  # found below, all of them, with both lines
    try:
        node = yaml.compose(text)
        if node is not None:
            _places(node, (), source, places, problems)
        return None if any(p.endswith(BAD_KEY) for p in problems) else yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        problems.append(f"{where}: not valid YAML: {error.problem}")
    except ReaderError as error:
        problems.append(f"{source}: not valid YAML: character {error.character!r} at offset {error.position}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # a tag or a date with a value it cannot hold
        problems.append(f"{source}: not valid YAML: {error}")
    except RecursionError:
        problems.append(f"{source}: nested too deeply, or an alias holds itself; a recipe has two levels of keys")
    return None


def _places(node: Node, key: Key, source: str, places: dict[Key, str], problems: list[str]) -> None:
    if isinstance(node, MappingNode):
        for name, value in node.value:
            place = f"{source}:{name.start_mark.line + 1}"
            if not isinstance(name, ScalarNode):
                problems.append(f"{place}: {BAD_KEY}")
                continue
            child = (*key, name.value)
            if child in places:
                problems.append(f"{place}: {dotted(child)} is given twice, first at {places[child]}; keep one")
                continue
            places[child] = place
            _places(value, child, source, places, problems)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            places[*key, index] = f"{source}:{value.start_mark.line + 1}"
            _places(value, (*key, index), source, places, problems)


def _override(data: dict[str, Any], override: str, places: dict[Key, str], problems: list[str]) -> None:
    """Puts one `dotted.key=value` into the data."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        problems.append(f"override {override!r}: write it as key=value, for example distill.lr=3e-4")
        return
    found: list[str] = []
    value = _read(text, f"override {override!r}", {}, found)
    if found:
        problems += [f"{problem} (quote the value when it is a text)" for problem in found]
        return
    at = data
    for depth, key in enumerate(keys[:-1]):
        if at.get(key) is None:
            at[key] = {}
        if not isinstance(at[key], dict):
            problems.append(f"override {override!r}: {'.'.join(keys[: depth + 1])} = {at[key]!r} holds no keys")
            return
        at = at[key]
    at[keys[-1]] = value
    for stale in [place for place in places if place[: len(keys)] == tuple(keys)]:
        del places[stale]
    places[tuple(keys)] = f"override {override!r}"


def _not_json(value: Any, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Values that YAML knows and a recipe cannot hold: dates, binary, half characters, keys that are no text."""
    if isinstance(value, dict):
        for name, child in value.items():
            if not isinstance(name, str):
                yield (*key, str(name)), f"the key {name!r} is no text; quote it"
            elif half := HALF.search(name):
                yield (*key, ascii(name)), f"the key holds half a character, {half[0]!a}"
            else:
                yield from _not_json(child, (*key, name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _not_json(child, (*key, index))
    elif isinstance(value, str) and (half := HALF.search(value)):
        yield key, f"= {value!a} holds half a character, {half[0]!a}; write the whole one"
    elif isinstance(value, int) and value.bit_length() > 64:
        yield key, f"is a whole number of {value.bit_length()} bits; no key takes more than 64"
    elif value is not None and not isinstance(value, str | int | float | bool):
        yield key, f"= {value} is read as a {type(value).__name__}; quote it to mean text"
