"""Code prompts: library functions to write, explain or test, and small tasks in several languages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from distill.bundled.languages import LANGUAGES, function_name, python_stub, stub
from distill.bundled.library import Function, functions
from distill.bundled.split import chooser, is_heldout
from distill.bundled.tasks import Task, source, tasks

PER_PACKAGE = 160  # functions of one package, so that no package sets the tone
COMPLETE = (
    "Write the body of this Python {kind}.",
    "Complete the {kind} below. It must do what its docstring says.",
    "Here is the signature and docstring of a Python {kind}. Please implement it and show the whole {kind}.",
    "Fill in the implementation of `{name}`.",
    "Finish this Python {kind}. Answer with the finished code.",
    "I need an implementation of the following {kind}, nothing else changed:",
    "Implement `{name}` so that it matches its documentation.",
    "Please write the missing code of this {kind}, which belongs to a module named `{module}`.",
)
EXPLAIN = (
    "What does this Python {kind} do? Explain it step by step.",
    "Explain the following code to somebody who is new to Python.",
    "Describe in a few sentences what `{name}` does and what it returns.",
)
TEST = (
    "Write unit tests for the following Python {kind} with pytest.",
    "Please write a few test cases for `{name}`, edge cases included.",
)
SOLVE = (
    "Write the body of this {language} function.",
    "Complete the {language} function below so that it gives the results of the examples.",
    "Finish this {language} code and return all of it.",
    "Please implement this function in {language}.",
    "Here is a stub in {language}. Replace it by a working implementation, in one code block.",
)
ASK = (
    "Write a {language} function called `{name}` that {does}.",
    "Write a function in {language} which {does}. Call it `{name}`.",
    "How can I write a {language} function `{name}` that {does}? Show the code.",
    "In {language}, write a function `{name}`. It {does}. Add a short example of its use.",
)
TRACE = (
    "What does this Python function return for `{call}`? Explain your reasoning.",
    "Say what this code computes, then give the value of `{call}`.",
    "Go through the function line by line and work out `{call}`.",
)


def code_texts(split: str) -> Iterator[tuple[str, str]]:
    """(prompt, source) of every code prompt; a library module or a small task belongs to one split alone."""
    heldout = split == "heldout"
    counts: Counter[str] = Counter()
    for function in functions():
        package = function.module.split(".")[0].lstrip("_")
        counts[package] += 1
        if is_heldout(f"module {package}") == heldout and counts[package] <= PER_PACKAGE:
            where = f"Python standard library, {function.module}"
            yield _library_prompt(function, chooser(f"code {function.module} {function.stub}")), where
    for task in tasks():
        if is_heldout(f"task {task.name}") == heldout:
            yield from ((text, "small tasks") for text in _task_prompts(task, chooser(f"prompt {task.name}")))


def _library_prompt(function: Function, rng: random.Random) -> str:
    kind = "method" if function.owner else "function"
    names = {"kind": kind, "name": function.name, "module": function.module}
    use = rng.random()
    whole = f"{function.stub}\n{function.body.lstrip(chr(10))}"
    if function.body.strip() and use < 0.1:
        return f"{rng.choice(EXPLAIN).format(**names)}\n\n{_fenced(_in_class(function, whole, rng))}"
    if function.body.strip() and use < 0.15:
        return f"{rng.choice(TEST).format(**names)}\n\n{_fenced(_in_class(function, whole, rng))}"
    block = _fenced(_in_class(function, function.stub, rng))
    ask = rng.choice(COMPLETE).format(**names)
    return f"{block}\n\n{ask.rstrip(':')}" if use > 0.92 else f"{ask}\n\n{block}"


def _in_class(function: Function, text: str, rng: random.Random) -> str:
    """A method is shown inside its class half of the time."""
    if function.owner is None or rng.random() < 0.5:
        return text
    return f"class {function.owner}:\n" + "\n".join("    " + line if line else line for line in text.split("\n"))


def _task_prompts(task: Task, rng: random.Random) -> Iterator[str]:
    """Python three times (to write, to write from words alone, to trace), and four other languages."""
    names = {"language": "Python", "name": task.name, "does": task.does}
    for style in rng.sample(range(3), 2):
        yield f"{rng.choice(SOLVE).format(**names)}\n\n{_fenced(python_stub(task, rng.random() < 0.6, style))}"
    if rng.random() < 0.5:
        yield rng.choice(ASK).format(**names)
    if rng.random() < 0.6:
        call = f"f({', '.join(map(repr, task.examples[0][0]))})"
        yield f"{rng.choice(TRACE).format(call=call)}\n\n{_fenced(source(task, 'f'))}"
    for language in rng.sample(LANGUAGES, 4):
        names = {"language": language.name, "name": function_name(task, language), "does": task.does}
        if rng.random() < 0.25:
            yield rng.choice(ASK).format(**names)
        else:
            yield f"{rng.choice(SOLVE).format(**names)}\n\n{_fenced(stub(task, language), language.fence)}"


def _fenced(code: str, tag: str = "python") -> str:
    return f"```{tag}\n{code}\n```"
