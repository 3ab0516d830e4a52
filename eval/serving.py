"""python -m eval.serving RECIPE [key=value ...] --server URL [--baseline URL]: the held-out traffic against a server.

Any OpenAI-compatible server: chat completions, streamed, tokens by its usage. Domains take turns, so that the server's
counters tell them apart. Exit code 0: measured; 1: a server answered nothing; 2: bad input; 130: interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from distill.endpoint import find_model, headers
from distill.fields import web_address
from distill.files import read_object
from distill.provenance import collect
from distill.recipe import Recipe, load_recipe
from eval.client import Load, Question, Server, counters_of, open_client, run_load
from eval.counters import Counters, between
from eval.entry import guarded, talk, whole
from eval.records import ALL
from eval.served import BASELINE, SPECULATIVE, ServedRow, append_served, build_served, engine_figures
from eval.served_view import render_served, served_table

log = logging.getLogger(__name__)
console = Console(stderr=True)
# What a request gets from the recipe and the command line.
OWN_FIELDS = {"max_tokens", "messages", "model", "seed", "stream", "stream_options", "temperature", "top_p"}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, writes."""
    parser = argparse.ArgumentParser(prog="python -m eval.serving", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", help="a recipe, such as recipes/code.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--server", required=True, metavar="URL", help="the server that speculates")
    parser.add_argument("--baseline", metavar="URL", help="the same target without a draft")
    parser.add_argument("--model", help="name to ask the server for (default: the one it lists)")
    parser.add_argument("--baseline-model", help="name to ask the baseline for (default: the one it lists)")
    parser.add_argument("--concurrency", default=None, metavar="N,...", help="requests in flight (default: 1,4,16)")
    parser.add_argument("--open-rate", type=float, metavar="R", help="arrivals a second, whatever is in flight")
    parser.add_argument("--report", type=Path, help="report.json of eval.run, to set beside the server's figures")
    parser.add_argument("--arm", help="arm of the report (default: its choice)")
    parser.add_argument("--body", metavar="JSON", help="fields for every request beside OpenAI's: '{\"top_k\": 0}'")
    parser.add_argument("--ties", action="store_true", help="load the target: are texts that differ ties? (greedy)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (default: 600)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the servers' key")
    parser.add_argument("--out", type=Path, help="folder (default: OUTPUT_DIR/NAME/serving/TIME)")
    args = parser.parse_intermixed_args(argv)
    talk(console)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    return guarded(lambda: _work(args), "rows measured so far are kept")


def _work(args: argparse.Namespace) -> int:
    """What the command line asks for; the exit code."""
    result, folder = measure(load_recipe(args.recipe, args.overrides), args)
    console.print(served_table(result), crop=False)
    console.print(f"written: {folder / 'serving.md'}", highlight=False)
    answered = {cell["arm"] for cell in result["cells"] if cell["num_requests"]}
    return 0 if answered == set(result["servers"]) else 1


def measure(recipe: Recipe, args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Asks the servers and writes requests.jsonl, serving.json and serving.md.

    Args:
        recipe: its traffic and eval stages count.
        args: of the command line.

    Returns:
        what serving.json holds, and its folder.

    Raises:
        ValueError: bad arguments; ConnectionError: a server does not answer at all.
    """
    loads = loads_of(args.concurrency, args.open_rate)
    report = None
    if args.report:
        report = read_object(args.report, ValueError, "report", "--report ", "; give report.json of eval.run")
    body = body_of(args.body)
    servers = [Server(BASELINE, args.baseline, args.baseline_model or "", body)] if args.baseline else []
    servers.append(Server(SPECULATIVE, args.server, args.model or "", body))
    for server in servers:
        option = "--server" if server.arm == SPECULATIVE else "--baseline"
        try:
            web_address(server.url)
        except ValueError as error:
            raise ValueError(f"{option} {error}") from error
    if args.baseline == args.server:
        raise ValueError(f"--server and --baseline are both {args.server}; leave --baseline out, or give another")
    if args.ties and (not args.baseline or recipe.eval.temperature):
        raise ValueError("--ties compares greedy texts with the baseline's; give --baseline and eval.temperature=0")
    if not args.timeout > 0:
        raise ValueError(f"--timeout = {args.timeout:g} must be above 0")
    headers(args.api_key_env)
    out = args.out or Path(recipe.output_dir) / recipe.name / "serving" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    if (out / "requests.jsonl").exists():
        raise ValueError(f"{out / 'requests.jsonl'} holds rows of an earlier measurement; give another --out")
    servers = [
        server if server.model else replace(server, model=find_model([server.url], args.api_key_env))
        for server in servers
    ]
    if report is not None:
        with whole(args.report, "report"):
            for load in loads:  # a wrong arm or a damaged cell is told before anything is asked
                for domain in (ALL, *recipe.eval.domains):
                    engine_figures(report, args.arm, domain, load.name)
    questions, told = questions_of(recipe)
    out.mkdir(parents=True, exist_ok=True)
    rows, counted = asyncio.run(
        _ask(recipe, servers, questions, loads, args.timeout, args.api_key_env, out / "requests.jsonl")
    )
    result = {
        "format": 1,
        "recipe": recipe.name,
        "servers": {server.arm: {"url": server.url, "model": server.model} for server in servers},
        "settings": recipe.eval.model_dump(mode="json")
        | {"seed": recipe.seed, "timeout_s": args.timeout, "body": body}
        | told,
        "report": str(args.report) if args.report else None,
        "cells": build_served(rows, counted, report, args.arm),
        "ties": ties_of(recipe, rows, questions) if args.ties else None,
        "provenance": collect(recipe.seed, "server"),
    }
    (out / "serving.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    (out / "serving.md").write_text(render_served(result), encoding="utf-8")
    return result, out


def body_of(text: str | None) -> dict[str, Any]:
    """Fields for every request beside OpenAI's.

    Raises:
        ValueError: no JSON object, or one that sets what the recipe says.
    """
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--body {text!r}: not JSON ({error}); give an object such as '{{\"top_k\": 0}}'") from error
    if not isinstance(value, dict):
        raise ValueError(f"--body {text!r}: a {type(value).__name__}; give an object such as '{{\"top_k\": 0}}'")
    if taken := sorted(OWN_FIELDS & value.keys()):
        raise ValueError(f"--body sets {taken[0]!r}, which comes from the recipe or the command line; change it there")
    return value


def ties_of(recipe: Recipe, rows: Sequence[ServedRow], questions: Sequence[Question]) -> dict[str, Any]:
    """What the target, in float32, says of the first token at which each text leaves the baseline's."""
    from distill.models import load_model, load_tokenizer, resolve
    from distill.tokens import eos_ids
    from eval.served_ties import pairs_of, partings, summary

    folder = resolve(recipe.target.model, recipe.target.revision)
    model = load_model(folder, "float32", trust_remote_code=recipe.target.trust_remote_code)
    tokenizer, pairs = load_tokenizer(folder), pairs_of(rows)
    eos = eos_ids(model.config, model.generation_config, tokenizer)
    prompts = {question.id: question.messages for question in questions}
    return summary(pairs, list(partings(pairs, prompts, model, tokenizer, eos)))


def loads_of(concurrency: str | None, open_rate: float | None) -> list[Load]:
    """The loads to measure: closed ones of 1, 4 and 16 requests when none is asked for.

    Raises:
        ValueError: a number that is none, or out of range.
    """
    text = concurrency if concurrency is not None else "" if open_rate is not None else "1,4,16"
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"--concurrency = {concurrency!r} must be different whole numbers from 1 to 1024: 1,4,16")
    if open_rate is not None and not 0 < open_rate <= 10_000:
        raise ValueError(f"--open-rate = {open_rate:g} must be above 0 and 10,000 a second at most")
    return [Load(num=int(part)) for part in parts] + ([Load(rate=open_rate)] if open_rate is not None else [])


def questions_of(recipe: Recipe) -> tuple[list[Question], dict[str, Any]]:
    """The prompts that eval.run measures with, and what is told of others and of those that were cut.

    Raises:
        ValueError: none fits.
    """
    from distill.models import load_config, load_tokenizer
    from distill.tokens import with_system
    from eval.prompts import choose_prompts

    target = recipe.target.model, recipe.target.revision, recipe.target.trust_remote_code
    positions = getattr(load_config(*target), "max_position_embeddings", None)
    choice = choose_prompts(recipe, load_tokenizer(*target), positions)
    questions = []
    for (domain, group), cell in choice.cells.items():
        for taken in cell:
            messages = tuple(with_system(taken.prompt.messages, recipe.traffic.system))
            questions.append(Question(taken.prompt.id, domain, group, len(taken.ids), messages))
    return questions, choice.told()


async def _ask(
    recipe: Recipe,
    servers: Sequence[Server],
    questions: Sequence[Question],
    loads: Sequence[Load],
    timeout_s: float,
    variable: str | None,
    path: Path,
) -> tuple[list[ServedRow], dict[tuple[str, str, str], Counters | None]]:
    """All rows, written as they come, and the server's counters over each block."""
    rows: list[ServedRow] = []
    counted: dict[tuple[str, str, str], Counters | None] = {}

    def keep(row: ServedRow) -> None:
        rows.append(row)
        append_served(path, [row])

    domains = list(dict.fromkeys(question.domain for question in questions))
    async with open_client(variable, timeout_s) as client:
        for server in servers:
            first = questions[: recipe.eval.warmup]
            await run_load(client, server, first, Load(num=1), recipe, timeout_s, keep, warmup=True)
        for number, (load, domain) in enumerate((load, domain) for load in loads for domain in domains):
            block = [question for question in questions if question.domain == domain]
            # Every second block goes the other way round, so that a machine that drifts hurts both servers alike.
            for server in servers if number % 2 == 0 else servers[::-1]:
                log.info("%s, %s, %s: %d requests", server.arm, load.name, domain, len(block))
                before = await counters_of(client, server)
                await run_load(client, server, block, load, recipe, timeout_s, keep)
                after = await counters_of(client, server)
                counted[server.arm, load.name, domain] = between(before, after)
    return rows, counted


if __name__ == "__main__":
    sys.exit(main())
