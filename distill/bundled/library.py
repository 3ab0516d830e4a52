"""The installed Python standard library as text: its functions with docstrings, and the docstrings as passages."""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

# Tests, tables, generated data and vendored tools: little in them reads like code that somebody would ask for.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "distutils",
    "encodings",
}
SKIPPED |= {"pydoc_data", "ensurepip", "turtledemo", "__pycache__"}
# Parsing all of the library takes five seconds, finding headers with docstrings by pattern a fraction of one. Each
# hit is parsed by itself afterwards, so a wrong match is dropped.
FUNCTION = re.compile(
    r"^(?P<indent>[ ]*)(?P<head>(?:async )?def (?P<name>\w+)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)(?:\s*->[^:\n]+)?:)"
    r'[ ]*\n(?P<doc>[ ]+[rR]?"""(?P<text>.*?)""")[ ]*\n',
    re.MULTILINE | re.DOTALL,
)
CLASS = re.compile(r"^(?P<indent>[ ]*)class (?P<name>\w+)[^\n]*:", re.MULTILINE)


@dataclass(frozen=True)
class Function:
    """A function of the library.

    Attributes:
        module: dotted name of its module.
        owner: class it is a method of; None for a plain function.
        name: its name.
        stub: header and docstring, dedented.
        doc: the docstring's text, dedented.
        body: what follows the docstring, dedented to the stub's body; empty when it is long.
    """

    module: str
    owner: str | None
    name: str
    stub: str
    doc: str
    body: str


@cache
def files() -> tuple[tuple[str, str], ...]:
    """(dotted module name, text) of every source file, in order of name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED & set(parts):
            # Old files may hold other encodings; a wrong character only drops one docstring's look.
            module = ".".join(part for part in parts if part != "__init__")
            found.append((module, path.read_text(encoding="utf-8", errors="replace")))
    return tuple(found)


@cache
def functions() -> tuple[Function, ...]:
    """Every function with a docstring of some substance whose header parses by itself."""
    found = []
    for module, text in files():
        classes = [(match.start(), len(match["indent"]), match["name"]) for match in CLASS.finditer(text)]
        for match in FUNCTION.finditer(text):
            indent = len(match["indent"])
            doc = inspect.cleandoc(match["text"])
            # The stub starts on the match's own line; the docstring's lines keep their relative indentation.
            stub = dedent(match["indent"] + match["head"] + "\n" + match["doc"])
            if "�" in stub or not 60 <= len(doc) <= 1200 or not _parses(stub):
                continue
            owner = next((name for at, deep, name in reversed(classes) if at < match.start() and deep < indent), None)
            body = _body(text[match.end() :], indent)
            found.append(Function(module, owner if indent else None, match["name"], stub, doc, body))
    return tuple(found)


@cache
def passages() -> tuple[tuple[str, str, str], ...]:
    """(module, title, text) of docstrings that can be read as a passage: of modules, and of longer functions."""
    found = []
    for module, text in files():
        doc = _module_doc(text)
        if doc is not None and len(doc) >= 200:
            found.append((module, f"the Python module {module}", _paragraphs(doc, 1400)))
    for function in functions():
        if len(function.doc) >= 160 and ">>>" not in function.doc:
            kind = "method" if function.owner else "function"
            name = f"{function.owner}.{function.name}" if function.owner else f"{function.module}.{function.name}"
            found.append((function.module, f"the Python {kind} {name}", _paragraphs(function.doc, 1000)))
    return tuple(found)


def _parses(stub: str) -> bool:
    try:
        ast.parse(stub)
    except (SyntaxError, ValueError):
        return False
    return True


def _body(rest: str, indent: int, longest: int = 25) -> str:
    """The lines after the docstring that stand deeper than the header; empty when more than `longest`."""
    lines: list[str] = []
    for line in rest.split("\n"):
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        lines.append(line[indent:].rstrip())
        if len(lines) > longest:
            return ""
    return "\n".join(lines).rstrip()


def _module_doc(text: str) -> str | None:
    match = re.match(r'(?:\s*#[^\n]*\n|\s*\n)*\s*[rR]?"""(.*?)"""', text, re.DOTALL)
    return inspect.cleandoc(match[1]) if match and "�" not in match[1] else None


def _paragraphs(text: str, longest: int) -> str:
    """Whole paragraphs from the start, as many as fit; at least one, cut at a line."""
    taken = ""
    for paragraph in text.split("\n\n"):
        if taken and len(taken) + len(paragraph) > longest:
            break
        taken = f"{taken}\n\n{paragraph}" if taken else paragraph
    return taken if len(taken) <= longest else taken[:longest].rsplit("\n", 1)[0]
