"""Sends requests to a server at a given load and times what comes back. No torch."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx2

from distill.endpoint import Completion, Trouble, events, headers, limits, root
from distill.recipe import Recipe
from eval.counters import Counters, read_counters
from eval.served import ServedRow

# In an open loop a server that falls behind would be sent ever more; from here on arrivals wait, and the wait counts.
MOST_IN_FLIGHT = 1024
RETRIES = 2  # of a connection that failed: nothing was sent, so nothing is counted twice
RETRY_S = 0.2


@dataclass(frozen=True)
class Server:
    """A server to measure.

    Attributes:
        arm: baseline or server.
        url, model: its address and the name to ask it for.
        body: fields that every request gets beside OpenAI's, such as {"top_k": 0}.
    """

    arm: str
    url: str
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A prompt to ask: messages, and its tokens by the target's own template."""

    id: str
    domain: str
    group: str
    prompt_tok: int
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Load:
    """`num` requests in flight at all times, or else `rate` arrivals a second."""

    num: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"closed {self.num}" if self.num else f"open {self.rate:g}/s"


def open_client(variable: str | None, timeout_s: float) -> httpx2.AsyncClient:
    """A client for as many connections as any load needs; `variable` names the key's environment variable.

    Each request has a connection of its own: llama-server closes one behind a stream, and the next request on it would
    be lost, which looks like a dead server.
    """
    many = httpx2.Limits(max_connections=MOST_IN_FLIGHT, max_keepalive_connections=0)
    return httpx2.AsyncClient(headers=headers(variable), timeout=limits(timeout_s), limits=many)


async def counters_of(client: httpx2.AsyncClient, server: Server) -> Counters | None:
    """The server's speculation counters now; None when the server shows none."""
    try:
        response = await client.get(root(server.url) + "/metrics")
    except httpx2.HTTPError:
        return None  # no figure is better than no measurement; the requests themselves tell of a dead server
    return read_counters(response.text) if response.status_code == 200 else None


async def run_load(
    client: httpx2.AsyncClient,
    server: Server,
    questions: Sequence[Question],
    load: Load,
    recipe: Recipe,
    timeout_s: float,
    keep: Callable[[ServedRow], None],
    warmup: bool = False,
) -> None:
    """Asks every question once; a failure is a row too.

    Args:
        client: of `open_client`.
        server: where to.
        questions: each asked once, in this order.
        load: how many at a time, or how often.
        recipe: sampler, answer length and seed.
        timeout_s: of one request.
        keep: gets each row as it ends.
        warmup: tags the rows.
    """

    async def one(question: Question, arrival_s: float) -> None:
        keep(await _row(client, server, question, load, recipe, timeout_s, arrival_s, warmup))

    if load.num:
        waiting = iter(questions)

        async def worker() -> None:
            for question in waiting:
                await one(question, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.num, len(questions))):
                group.create_task(worker())
        return
    slots = asyncio.Semaphore(MOST_IN_FLIGHT)

    async def arrive(question: Question, arrival_s: float) -> None:
        async with slots:
            await one(question, arrival_s)

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for question, after_s in zip(questions, arrivals(load.rate, recipe.seed)):
            await asyncio.sleep(max(0.0, start_s + after_s - time.perf_counter()))
            group.create_task(arrive(question, start_s + after_s))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests arrive: independent of each other, `rate` a second, the first at 0."""
    draw, now = random.Random(seed), 0.0
    while True:
        yield now
        now += draw.expovariate(rate)


async def _row(
    client: httpx2.AsyncClient,
    server: Server,
    question: Question,
    load: Load,
    recipe: Recipe,
    timeout_s: float,
    arrival_s: float,
    warmup: bool,
) -> ServedRow:
    """One request, from its arrival to the end of its stream."""
    stage = recipe.eval
    body: dict[str, Any] = {
        "model": server.model,
        "messages": list(question.messages),
        "max_tokens": stage.max_new_tok,
        "temperature": stage.temperature,
        "top_p": stage.top_p,
        "seed": recipe.seed & 0x7FFFFFFF,
    }
    if stage.top_k:
        body["top_k"] = stage.top_k
    body |= server.body
    done, pieces, error, retried = Completion(), _Pieces(), None, 0
    while True:
        try:
            async with asyncio.timeout(timeout_s), aclosing(events(client, server.url, body)) as stream:
                async for event in stream:
                    if done.take(event):
                        pieces.seen(time.perf_counter())
            error = _fault(done)
        except TimeoutError:
            error = f"no whole answer in {timeout_s:g} s"
        except Trouble as found:
            if found.unsent and retried < RETRIES:
                retried += 1
                await asyncio.sleep(RETRY_S)
                continue
            error = str(found)
        break
    end_s = time.perf_counter()
    new_tok = _count(done.usage, "completion_tokens")
    spread_ms = 1e3 * (pieces.last_s - pieces.first_s)
    return ServedRow(
        request_id=question.id,
        domain=question.domain,
        group=question.group,
        arm=server.arm,
        load=load.name,
        warmup=warmup,
        error=error,
        prompt_tok=_count(done.usage, "prompt_tokens"),
        new_tok=0 if error else new_tok,
        own_prompt_tok=question.prompt_tok,
        cached_tok=_cached(done),
        finish=done.finish,
        ttft_ms=0.0 if error else 1e3 * (pieces.first_s - arrival_s),
        tpot_ms=None if error or new_tok < 2 or pieces.num < 2 else spread_ms / (new_tok - 1),
        e2e_ms=0.0 if error else 1e3 * (end_s - arrival_s),
        start_s=arrival_s,
        end_s=end_s,
        retried=retried,
        text=done.text,
        timings=done.timings,
    )


@dataclass
class _Pieces:
    """How many pieces of text came, and when the first and the last did."""

    num: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def seen(self, now_s: float) -> None:
        self.num += 1
        self.first_s = self.first_s or now_s
        self.last_s = now_s


def _fault(done: Completion) -> str | None:
    """Why an answer that came whole can not be counted; None when it can."""
    if not done.finish:
        return "the answer has no finish_reason: it was cut short"
    if not (_count(done.usage, "completion_tokens") and _count(done.usage, "prompt_tokens")):
        return "the answer has no usage, so its tokens can not be counted"
    if not done.text and not done.reasoning:
        return "the answer has no text"
    return None


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0


def _cached(done: Completion) -> int:
    """Prompt tokens that the server had already read."""
    details = done.usage.get("prompt_tokens_details")
    told = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    return told or _count(done.timings, "cache_n")
