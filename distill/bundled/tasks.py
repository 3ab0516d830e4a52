"""Small programming tasks with types, a Python solution and examples worked out by running that solution."""

from __future__ import annotations

import ast
import inspect
import math
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

from distill.bundled.solved import lists, strings
from distill.bundled.solved import numbers as arithmetic
from distill.bundled.split import chooser


@dataclass(frozen=True)
class Task:
    """A function somebody may ask for.

    Attributes:
        name: snake_case.
        does: what it does, a clause that starts with a verb ("returns the sum of ...").
        params: names and types; types are int, float, bool, str and list[...] of them.
        returns: its type.
        code: body of the Python solution, dedented.
        examples: arguments and results.
    """

    name: str
    does: str
    params: tuple[tuple[str, str], ...]
    returns: str
    code: str
    examples: tuple[tuple[tuple[Any, ...], Any], ...]


# name, adjective before the noun, clause after it, condition on x
FILTERS = (
    ("", "", "", ""),
    ("even", "even ", "", "x % 2 == 0"),
    ("odd", "odd ", "", "x % 2 != 0"),
    ("positive", "positive ", "", "x > 0"),
    ("negative", "negative ", "", "x < 0"),
    ("non_zero", "non-zero ", "", "x != 0"),
    ("two_digit", "two-digit ", "", "10 <= abs(x) <= 99"),
    ("multiples_of_three", "", " that are divisible by 3", "x % 3 == 0"),
    ("multiples_of_five", "", " that are multiples of 5", "x % 5 == 0"),
    ("above_ten", "", " greater than 10", "x > 10"),
    ("below_twenty", "", " smaller than 20", "x < 20"),
    ("ending_in_seven", "", " whose last digit is 7", "abs(x) % 10 == 7"),
    ("square", "", " that are perfect squares", "x >= 0 and int(x**0.5) ** 2 == x"),
    ("prime", "prime ", "", "x > 1 and all(x % d for d in range(2, int(x**0.5) + 1))"),
)
# name, "the ... of", expression in x
MAPS = (
    ("", "", "x"),
    ("squares", "the squares of ", "x * x"),
    ("cubes", "the cubes of ", "x**3"),
    ("absolute", "the absolute values of ", "abs(x)"),
    ("doubled", "twice the value of ", "2 * x"),
    ("last_digits", "the last digits of ", "abs(x) % 10"),
    ("digit_sums", "the digit sums of ", "sum(int(d) for d in str(abs(x)))"),
)
# name, "returns ... ", type, template over the generator
REDUCERS = (
    ("sum", "the sum of ", "int", "return sum({items})"),
    ("largest", "the largest of ", "int", "return max(({items}), default=0)"),
    ("smallest", "the smallest of ", "int", "return min(({items}), default=0)"),
    ("sorted", "a sorted list of ", "list[int]", "return sorted({items})"),
    ("list", "a list of ", "list[int]", "return [{items}]"),
    ("descending", "a list, in descending order, of ", "list[int]", "return sorted(({items}), reverse=True)"),
    ("distinct", "a sorted list without duplicates of ", "list[int]", "return sorted({{{items}}})"),
    ("average", "the average of ", "float", "values = [{items}]\nreturn sum(values) / len(values) if values else 0.0"),
)
CHARACTERS = (
    ("vowels", "vowels", "c.lower() in 'aeiou'"),
    ("consonants", "consonants", "c.isalpha() and c.lower() not in 'aeiou'"),
    ("digits", "digits", "c.isdigit()"),
    ("upper", "upper-case letters", "c.isupper()"),
    ("lower", "lower-case letters", "c.islower()"),
    ("spaces", "spaces", "c == ' '"),
    ("letters", "letters", "c.isalpha()"),
    ("special", "characters that are neither letters nor digits", "not c.isalnum()"),
)
CHARACTER_USES = (
    ("count", "returns how many {what} a string contains", "int", "return sum(1 for c in text if {test})"),
    ("remove", "removes all {what} from a string", "str", "return ''.join(c for c in text if not ({test}))"),
    ("keep", "keeps only the {what} of a string", "str", "return ''.join(c for c in text if {test})"),
    (
        "star",
        "replaces all {what} of a string by an asterisk",
        "str",
        "return ''.join('*' if {test} else c for c in text)",
    ),
    (
        "double",
        "repeats each of the {what} in a string twice",
        "str",
        "return ''.join(c * 2 if {test} else c for c in text)",
    ),
    (
        "front",
        "moves all {what} of a string to its front, keeping their order",
        "str",
        "return ''.join(sorted(text, key=lambda c: not ({test})))",
    ),
    (
        "positions",
        "returns the positions of all {what} in a string",
        "list[int]",
        "return [i for i, c in enumerate(text) if {test}]",
    ),
    (
        "only",
        "checks whether a string consists only of {what}",
        "bool",
        "return bool(text) and all({test} for c in text)",
    ),
    ("any", "checks whether a string contains any {what}", "bool", "return any({test} for c in text)"),
    (
        "reverse",
        "reverses the order of the {what} in a string and leaves all other characters in place",
        "str",
        "chosen = [c for c in text if {test}]\nreturn ''.join(chosen.pop() if {test} else c for c in text)",
    ),
)
WORD_TESTS = (
    ("long", "longer than four letters", "len(w) > 4"),
    ("short", "of at most three letters", "len(w) <= 3"),
    ("vowel_start", "that start with a vowel", "w[0].lower() in 'aeiou'"),
    ("ending_in_s", "that end with the letter s", "w.endswith('s')"),
    ("with_a", "that contain the letter a", "'a' in w.lower()"),
    ("palindromic", "that read the same backwards", "w.lower() == w.lower()[::-1]"),
    ("capitalised", "that start with a capital letter", "w[0].isupper()"),
    ("even_length", "with an even number of letters", "len(w) % 2 == 0"),
)
WORD_USES = (
    ("count", "counts the words {what} in a sentence", "int", "return sum(1 for w in text.split() if {test})"),
    (
        "list",
        "returns a list of the words {what} in a sentence",
        "list[str]",
        "return [w for w in text.split() if {test}]",
    ),
    (
        "drop",
        "removes the words {what} from a sentence",
        "str",
        "return ' '.join(w for w in text.split() if not ({test}))",
    ),
    (
        "upper",
        "writes the words {what} of a sentence in capitals",
        "str",
        "return ' '.join(w.upper() if {test} else w for w in text.split())",
    ),
    (
        "flip",
        "reverses the words {what} in a sentence, one by one",
        "str",
        "return ' '.join(w[::-1] if {test} else w for w in text.split())",
    ),
    (
        "first",
        "returns the first of the words {what} in a sentence, or an empty string when there is none",
        "str",
        "return next((w for w in text.split() if {test}), '')",
    ),
    (
        "lengths",
        "returns the lengths of the words {what} in a sentence",
        "list[int]",
        "return [len(w) for w in text.split() if {test}]",
    ),
)
WORDS = re.findall(
    r"\w+",
    "the quick brown fox jumps over a lazy dog while seven old radar stations send noon signals to Anna and every "
    "level harbour Otto likes green apples but Eva eats plums civic pride made us build tall stone towers near Oslo",
)


@cache
def tasks() -> tuple[Task, ...]:
    """Every task, each with two or three examples."""
    return tuple(task for sketch in (*_combined(), *_solved()) if (task := _worked(sketch)) is not None)


def source(task: Task, name: str) -> str:
    """The Python solution as a whole function under the given name, without annotations."""
    body = "\n".join("    " + line for line in task.code.split("\n"))
    return f"def {name}({', '.join(param for param, _ in task.params)}):\n{body}"


def _combined() -> Iterator[Task]:
    """Tasks put together from parts; they still lack examples."""
    numbers = (("numbers", "list[int]"),)
    for (reduce, lead, kind, template), (change, of, value), (keep, before, after, test) in product(
        REDUCERS, MAPS, FILTERS
    ):
        name = "_".join(part for part in (reduce, change, keep or ("" if change else "numbers")) if part)
        # All of them would drown the other tasks; what is trivial is left out too.
        if chooser(f"keep {name}").random() > 0.35 or (reduce, change, keep) == ("list", "", ""):
            continue
        items = f"{value} for x in numbers" + (f" if {test}" if test else "")
        does = f"returns {lead}{of}the {before}numbers{after} in a list of integers"
        if reduce in ("largest", "smallest", "average"):
            does += ", or 0 when there is none"
        yield Task(name, does, numbers, kind, template.format(items=items), ())
    for keep, before, after, test in FILTERS[1:]:
        does = f"the {before}numbers{after} in a list of integers"
        yield Task(f"count_{keep}", f"counts {does}", numbers, "int", f"return sum(1 for x in numbers if {test})", ())
        code = f"return [x for x in numbers if not ({test})]"
        yield Task(f"drop_{keep}", f"removes {does}", numbers, "list[int]", code, ())
    text = (("text", "str"),)
    for (use, does, kind, code), (name, what, test) in product(CHARACTER_USES, CHARACTERS):
        yield Task(f"{use}_{name}", does.format(what=what), text, kind, code.format(test=test), ())
    for (use, does, kind, code), (name, what, test) in product(WORD_USES, WORD_TESTS):
        yield Task(f"{use}_{name}_words", does.format(what=what), text, kind, code.format(test=test), ())


def _solved() -> Iterator[Task]:
    """The solved functions as tasks; they still lack examples."""
    for module in (lists, arithmetic, strings):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef):
                does = (ast.get_docstring(node) or "").rstrip(".")
                params = tuple((arg.arg, ast.unparse(arg.annotation or ast.Name("int"))) for arg in node.args.args)
                code = "\n".join(ast.unparse(line) for line in node.body[1:])
                kind = ast.unparse(node.returns or ast.Name("int"))
                yield Task(node.name, does[0].lower() + does[1:], params, kind, code, ())


def _worked(task: Task) -> Task | None:
    """Adds examples; None when too few inputs work."""
    rng = chooser(f"task {task.name}")
    space: dict[str, Any] = {"math": math, "statistics": statistics, "pairwise": pairwise}
    exec(source(task, task.name), space)
    examples: dict[str, tuple[tuple[Any, ...], Any]] = {}
    for _ in range(8):
        arguments = tuple(_value(kind, param, rng) for param, kind in task.params)
        try:
            examples.setdefault(repr(arguments), (arguments, space[task.name](*arguments)))
        except (ValueError, IndexError, ZeroDivisionError):
            continue
    # Different results say more than the same one three times.
    results = [repr(result) for _, result in examples.values()]
    ordered = sorted(examples.values(), key=lambda example: results.count(repr(example[1])))
    return replace(task, examples=tuple(ordered[: rng.choice((2, 2, 3))])) if len(ordered) > 1 else None


def _value(kind: str, param: str, rng: random.Random) -> Any:
    """A plausible argument; a name such as `k` or `n` asks for a small number."""
    if kind == "int":
        return (
            rng.randint(1, 6)
            if param in ("k", "n", "width")
            else rng.choice((rng.randint(2, 30), rng.randint(10, 999)))
        )
    if kind == "float":
        return rng.randint(2, 80) / 2
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "str":
        if param in ("word", "first", "second", "other"):
            return rng.choice(WORDS)
        if param in ("letter", "separator"):
            return rng.choice("aeost-")
        words = rng.sample(WORDS, rng.randint(2, 5))
        return " ".join(words) + rng.choice(("", "", "!", " 42", " 7"))
    size = rng.randint(3, 6)
    if kind == "list[int]":
        return [rng.choice((rng.randint(-20, 50), rng.choice((0, 4, 7, 9, 15, 16, 25, 37)))) for _ in range(size)]
    if kind == "list[float]":
        return [rng.randint(-20, 60) / 4 for _ in range(size)]
    if kind == "list[str]":
        return rng.sample(WORDS, size)
    assert kind == "list[list[int]]", kind
    width = rng.randint(2, 3)
    return [[rng.randint(-5, 12) for _ in range(width)] for _ in range(width)]
