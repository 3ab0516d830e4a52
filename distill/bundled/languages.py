"""Stubs of small tasks in thirteen programming languages, as somebody would paste them into a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distill.bundled.tasks import Task

# int, float, bool, str, list[int], list[float], list[str], list[list[int]]
KINDS = ("int", "float", "bool", "str", "list[int]", "list[float]", "list[str]", "list[list[int]]")


@dataclass(frozen=True)
class Language:
    """How a language writes a function.

    Attributes:
        name: as people write it.
        fence: tag of a code block.
        camel: names in camelCase, not snake_case.
        types: names of KINDS, in that order; empty for a language without declared types.
        param: one parameter, from {name} and {type}.
        stub: the whole, from {doc}, {name}, {params}, {type}; `doc` stands at the right indentation.
        comment: start, line prefix and end of a documentation comment; an empty start or end gives no line.
        call: an example's call and result, from {call} and {result}.
        brackets: around a list.
        words: true and false.
    """

    name: str
    fence: str
    camel: bool
    types: tuple[str, ...]
    param: str
    stub: str
    comment: tuple[str, str, str]
    call: str = "{call} == {result}"
    brackets: str = "[]"
    words: tuple[str, str] = ("true", "false")


BLOCK = ("/**", " * ", " */")
LANGUAGES = (
    Language(
        "JavaScript",
        "javascript",
        True,
        (),
        "{name}",
        "{doc}\nfunction {name}({params}) {{\n",
        BLOCK,
        "{call} // {result}",
    ),
    Language(
        "TypeScript",
        "typescript",
        True,
        ("number", "number", "boolean", "string", "number[]", "number[]", "string[]", "number[][]"),
        "{name}: {type}",
        "{doc}\nexport function {name}({params}): {type} {{\n",
        BLOCK,
        "{call} // {result}",
    ),
    Language(
        "Java",
        "java",
        True,
        ("int", "double", "boolean", "String", "List<Integer>", "List<Double>", "List<String>", "List<List<Integer>>"),
        "{type} {name}",
        "import java.util.*;\n\nclass Solution {{\n{doc}\n    public static {type} {name}({params}) {{\n",
        ("    /**", "     * ", "     */"),
    ),
    Language(
        "C#",
        "csharp",
        True,
        ("int", "double", "bool", "string", "List<int>", "List<double>", "List<string>", "List<List<int>>"),
        "{type} {name}",
        "using System;\nusing System.Linq;\nusing System.Collections.Generic;\n\nclass Program {{\n{doc}\n"
        "    public static {type} {name}({params}) {{\n",
        ("    /// <summary>", "    /// ", "    /// </summary>"),
    ),
    Language(
        "C++",
        "cpp",
        False,
        ("int", "double", "bool", "string", "vector<int>", "vector<double>", "vector<string>", "vector<vector<int>>"),
        "{type} {name}",
        "#include <string>\n#include <vector>\nusing namespace std;\n\n{doc}\n{type} {name}({params}) {{\n",
        BLOCK,
        brackets="{}",
    ),
    Language(
        "Go",
        "go",
        True,
        ("int", "float64", "bool", "string", "[]int", "[]float64", "[]string", "[][]int"),
        "{name} {type}",
        "package main\n\n{doc}\nfunc {name}({params}) {type} {{\n",
        ("", "// ", ""),
    ),
    Language(
        "Rust",
        "rust",
        False,
        ("i64", "f64", "bool", "String", "Vec<i64>", "Vec<f64>", "Vec<String>", "Vec<Vec<i64>>"),
        "{name}: {type}",
        "{doc}\nfn {name}({params}) -> {type} {{\n",
        ("", "/// ", ""),
    ),
    Language(
        "Ruby", "ruby", False, (), "{name}", "{doc}\ndef {name}({params})\n", ("", "# ", ""), "{call} # => {result}"
    ),
    Language(
        "PHP",
        "php",
        True,
        (),
        "${name}",
        "<?php\n\n{doc}\nfunction {name}({params}) {{\n",
        BLOCK,
        "{call} returns {result}",
    ),
    Language(
        "Perl",
        "perl",
        False,
        (),
        "${name}",
        "{doc}\nsub {name} {{\n    my ({params}) = @_;\n",
        ("", "# ", ""),
        "{call} returns {result}",
        words=("1", "0"),
    ),
    Language(
        "Kotlin",
        "kotlin",
        True,
        ("Int", "Double", "Boolean", "String", "List<Int>", "List<Double>", "List<String>", "List<List<Int>>"),
        "{name}: {type}",
        "{doc}\nfun {name}({params}): {type} {{\n",
        BLOCK,
    ),
    Language(
        "Swift",
        "swift",
        True,
        ("Int", "Double", "Bool", "String", "[Int]", "[Double]", "[String]", "[[Int]]"),
        "{name}: {type}",
        "{doc}\nfunc {name}({params}) -> {type} {{\n",
        BLOCK,
    ),
    Language(
        "Scala",
        "scala",
        True,
        ("Int", "Double", "Boolean", "String", "List[Int]", "List[Double]", "List[String]", "List[List[Int]]"),
        "{name}: {type}",
        "object Solution {{\n{doc}\n  def {name}({params}): {type} = {{\n",
        ("  /**", "   * ", "   */"),
    ),
)


def stub(task: Task, language: Language) -> str:
    """Header and documentation comment of a task, with its examples, and no body."""
    name = function_name(task, language)
    kinds = dict(zip(KINDS, language.types))
    params = ", ".join(
        language.param.format(name=_camel(param) if language.camel else param, type=kinds.get(kind, ""))
        for param, kind in task.params
    )
    lines = [task.does[0].upper() + task.does[1:] + ".", "Examples:" if len(task.examples) > 1 else "Example:"]
    for arguments, result in task.examples:
        call = f"{name}({', '.join(literal(value, language) for value in arguments)})"
        lines.append("  " + language.call.format(call=call, result=literal(result, language)))
    start, prefix, end = language.comment
    doc = "\n".join(line for line in (start, *((prefix + line).rstrip() for line in lines), end) if line)
    return language.stub.format(doc=doc, name=name, params=params, type=kinds.get(task.returns, "")).rstrip("\n")


def python_stub(task: Task, annotated: bool, style: int) -> str:
    """The same in Python, with the examples as an interactive session (style 0), as calls (1) or as assertions (2)."""
    params = ", ".join(f"{param}: {kind}" if annotated else param for param, kind in task.params)
    result = f" -> {task.returns}" if annotated else ""
    lines = [f"def {task.name}({params}){result}:", f'    """{task.does[0].upper() + task.does[1:]}.']
    lines += [""] if style != 0 else []
    for arguments, value in task.examples:
        call = f"{task.name}({', '.join(map(repr, arguments))})"
        lines += (
            [f"    >>> {call}", f"    {value!r}"],
            [f"    {call} -> {value!r}"],
            [f"    assert {call} == {value!r}"],
        )[style]
    return "\n".join([*lines, '    """'])


def function_name(task: Task, language: Language) -> str:
    """The task's name as the language's people write it."""
    return _camel(task.name) if language.camel else task.name


def literal(value: Any, language: Language) -> str:
    """A value as the language writes it."""
    if isinstance(value, bool):
        return language.words[0] if value else language.words[1]
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    if isinstance(value, list):
        inner = ", ".join(literal(item, language) for item in value)
        return f"{language.brackets[0]}{inner}{language.brackets[1]}"
    return repr(value)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
