"""What every recipe stage is built from: field types with their ranges, checks of one field, and the base class."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

BUNDLED_DOMAINS = ("code", "math", "qa")

Positive = Annotated[int, Field(ge=1)]
Processes = Annotated[int, Field(ge=1, le=1024)]
Length = Annotated[int, Field(ge=1, le=16)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
TopP = Annotated[float, Field(gt=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Text = Annotated[str, Field(min_length=1)]
if TYPE_CHECKING:
    Loss = str  # so that the mapping passes where dict[str, float] is asked for
else:
    Loss = Literal["forward_kl", "reverse_kl", "jsd", "tv", "tv_pp", "neg_log_alpha", "kl_tv", "cross_entropy"]


def sources(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """One or many sources of prompts, as a tuple."""
    return (value,) if isinstance(value, str) else value


def matches(source: str) -> list[Path]:
    """What a path or glob names, sorted; a path that exists is itself, brackets and stars in it included."""
    name = os.path.expanduser(source)  # Path.expanduser raises for an unknown user, Path.exists for a very long name
    return [Path(name)] if os.path.exists(name) else sorted(map(Path, glob(name, recursive=True)))


def paths(source: str) -> set[Path]:
    """The existing files that a path or glob names; empty for a hub id."""
    return {path.resolve() for path in matches(source)}


def web_address(value: str) -> str:
    """Refuses what is no plain http(s) address. A value that may hold a password is not repeated in the message."""
    shown = "" if any(c in value for c in "@?#") else f"= {value!r} "
    wanted = "must be http(s)://HOST[:PORT][/PATH], without user, password, query or fragment"
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{shown}{wanted}") from error
    plain = value.isascii() and value.isprintable() and not any(c in value for c in " @?#\\")
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{shown}{wanted}")
    return value


def variable_name(value: str) -> str:
    """Refuses what is no name of an environment variable; the value is not repeated, it may be the key itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("must be the name of an environment variable that holds the key, not the key: LETTERS_DIGITS")
    return value


def increasing(values: tuple[int, ...]) -> tuple[int, ...]:
    """Refuses numbers that do not grow from one to the next."""
    if any(after <= before for before, after in pairwise(values)):
        raise ValueError(f"= {list(values)} must be strictly increasing, each layer once")
    return values


def ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    """Refuses an empty or turned range."""
    if not bounds[0] < bounds[1]:
        raise ValueError(f"= {list(bounds)} must be [low, high] with low < high")
    return bounds


def distinct(values: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Refuses a value that is given twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"= {list(values)} names a value twice")
    return values


Url = Annotated[str, AfterValidator(web_address)]
Variable = Annotated[str, AfterValidator(variable_name)]


class Clash(ValueError):
    """Fields that are right alone and wrong together.

    Attributes:
        problems: pairs of a key (relative to the stage that raised) and what is wrong with it.
    """

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))
        self.problems = problems


class Stage(BaseModel):
    """A frozen part of the recipe that refuses unknown keys and never converts a value to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def clashes(self) -> Iterator[tuple[str, str]]:
        """Yields (key, message) for every contradiction between fields."""
        yield from ()

    @model_validator(mode="after")
    def _no_clashes(self) -> Self:
        if problems := list(self.clashes()):
            raise Clash(problems)
        return self
