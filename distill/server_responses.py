"""The target's answers from OpenAI-compatible endpoints: any number of them, any of which may die.

Endpoints share one queue of prompts. A request that an endpoint could not answer goes back into it; an endpoint that
keeps failing waits ever longer and is given up at last. Replies are given on in the order of the prompts, which are
asked a bounded number ahead of the first one without a reply. Token ids are asked for, and done without where an
endpoint refuses the question; what is text alone is tokenised again. The prompt's tokens, or their number, show whether
the endpoint's chat template is the target's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from distill.completion import Reply, read_answer
from distill.endpoint import Completion, EndpointError, Trouble, events, find_model, headers, limits
from distill.schema import Responses
from distill.tokens import with_system
from distill.worklist import Work

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0

# Prompts that may be ahead of the oldest one without a reply, for each request in flight: a slow answer or a retry
# delays no other, and what waits for its turn is text.
AHEAD = 16


class ServersDown(ConnectionError):
    """Every endpoint was given up before all prompts were answered."""


@dataclass(order=True)
class _Task:
    number: int
    work: Work = field(compare=False)
    retried: int = field(default=0, compare=False)
    failed: int = field(default=0, compare=False)  # failures that may be the prompt's own


@dataclass
class _Endpoint:
    url: str
    gives_ids: bool = True  # until it refuses to
    answered: int = 0
    failures: int = 0  # rounds in a row
    round: int = 0
    ready_at: float = 0.0
    dead: bool = False
    said: str = ""


def pin_model(folder: Path, stage: Responses) -> str:
    """The model's name that the answers are asked under: the recipe's, the manifest's, or what the endpoints list.

    Args:
        folder: of the answers; a manifest there names the model, so that a finished folder needs no endpoint.
        stage: endpoints and key.

    Raises:
        EndpointError: the key is missing, or an endpoint lists none or several models.
        ConnectionError: no endpoint answers.
    """
    headers(stage.api_key_env)  # a missing key is told before anything is asked
    if stage.server_model is not None:
        return stage.server_model
    path = folder / "manifest.json"
    if path.exists() and (name := json.loads(path.read_text(encoding="utf-8"))["settings"].get("served_model")):
        return str(name)
    try:
        return find_model(stage.server, stage.api_key_env)
    except EndpointError as error:
        raise EndpointError(f"responses.server: {error} (responses.server_model)") from error


def ask(
    work: Iterable[Work], stage: Responses, model: str, seed: int, system: str | None
) -> Iterator[tuple[int, Reply]]:
    """Sends every prompt to some endpoint; what comes back, in the order of the prompts.

    Endpoints are only served while the caller waits for the next reply, so a slow caller slows them down.

    Args:
        work: prompts, their ids and temperatures; read a little ahead.
        stage: endpoints, lengths, sampler.
        model: the name to ask for.
        seed: each request's own seed comes from it and the prompt's id.
        system: system message of prompts that have none.

    Yields:
        a prompt's place in the work and one reply to it.

    Raises:
        EndpointError: the API key is missing.
        ServersDown: every endpoint was given up; what was not yielded was not answered.
    """
    fleet = _Fleet(stage, model, seed, system)
    with asyncio.Runner() as runner:
        runner.run(fleet.start(work))
        try:
            while (found := runner.run(fleet.next())) is not None:
                yield found
        except ServersDown:
            yield from sorted(fleet.done.items(), key=lambda found: found[0])  # they waited for one that is not there
            raise
        finally:
            runner.run(fleet.stop())


@dataclass
class _Fleet:
    """The endpoints, their workers, the prompts to ask and the replies."""

    stage: Responses
    model: str
    seed: int
    system: str | None
    endpoints: list[_Endpoint] = field(init=False)
    done: dict[int, Reply] = field(default_factory=dict)  # replies that wait for their turn

    async def start(self, work: Iterable[Work]) -> None:
        stage = self.stage
        self.endpoints = [_Endpoint(url) for url in stage.server]
        num = stage.concurrency * len(self.endpoints)
        self.client = httpx2.AsyncClient(
            headers=headers(stage.api_key_env),
            timeout=limits(stage.timeout_s),
            # One connection a request: llama-server closes it behind a stream, without a word to the next one.
            limits=httpx2.Limits(max_connections=num, max_keepalive_connections=0),
        )
        self.source = enumerate(work)
        self.first = self.fed = 0  # places of the oldest prompt without a reply and of the next one to ask
        self.window = AHEAD * num
        self.work: asyncio.PriorityQueue[_Task] = asyncio.PriorityQueue()  # the oldest first: others wait for it
        self.news = asyncio.Event()
        self.over = False
        self.bug: BaseException | None = None
        each = [endpoint for endpoint in self.endpoints for _ in range(stage.concurrency)]
        self.workers = [asyncio.create_task(self._worker(endpoint)) for endpoint in each]
        for worker in self.workers:
            worker.add_done_callback(self._ended)

    async def stop(self) -> None:
        for worker in self.workers:
            worker.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)
        await self.client.aclose()

    async def next(self) -> tuple[int, Reply] | None:
        """The next prompt's place and reply; None when all have one."""
        while self.fed < self.first + self.window and (one := next(self.source, None)) is not None:
            self.work.put_nowait(_Task(*one))
            self.fed += 1
        if self.first == self.fed:
            return None
        while self.first not in self.done:
            if self.bug is not None:
                raise self.bug
            if self.over:
                raise self._down()
            self.news.clear()
            await self.news.wait()
        number, self.first = self.first, self.first + 1
        return number, self.done.pop(number)

    def _down(self) -> ServersDown:
        left = self.fed - self.first - len(self.done) + sum(1 for _ in self.source)
        lines = "\n".join(f"  {endpoint.url}: {endpoint.said}" for endpoint in self.endpoints)
        return ServersDown(
            f"all {len(self.endpoints)} endpoints of responses.server were given up, {left} prompts are not answered:\n"
            f"{lines}\nanswers so far are kept; bring an endpoint back and resume the run"
        )

    def _settle(self, task: _Task, reply: Reply) -> None:
        self.done[task.number] = reply
        self.news.set()

    def _ended(self, worker: asyncio.Task[None]) -> None:
        """A worker that raised would be waited for in vain."""
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self.bug = error
            self.news.set()

    async def _worker(self, endpoint: _Endpoint) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while (wait := endpoint.ready_at - loop.time()) > 0:
                await asyncio.sleep(wait)
            task = await self.work.get()
            if endpoint.dead or endpoint.ready_at > loop.time():
                self.work.put_nowait(task)
                if endpoint.dead:
                    return
                continue
            began, with_ids = endpoint.round, endpoint.gives_ids
            try:
                reply = await self._request(endpoint, task, with_ids)
            except Trouble as found:
                if found.kind == "refused" and with_ids and not endpoint.answered:
                    # Perhaps the question for ids: without it once more, and only then it counts.
                    endpoint.gives_ids = False
                    self.work.put_nowait(task)
                else:
                    self._trouble(endpoint, began, task, found)
                continue
            endpoint.answered += 1
            endpoint.failures = 0
            self._settle(task, reply)

    async def _request(self, endpoint: _Endpoint, task: _Task, with_ids: bool) -> Reply:
        prompt, ids, temperature = task.work
        digest = hashlib.sha256(f"{self.seed}:{prompt.id}".encode()).digest()
        body: dict[str, Any] = {
            "model": self.model,
            "messages": with_system(prompt.messages, self.system),
            "max_tokens": self.stage.max_new_tok,
            "temperature": temperature,
            "top_p": self.stage.top_p,
            "seed": int.from_bytes(digest[:4], "big") >> 1,
        }
        if self.stage.top_k:
            body["top_k"] = self.stage.top_k  # not OpenAI's: servers that do not know it refuse the request
        if with_ids:
            body["return_token_ids"] = True  # vLLM's
        completion = Completion()
        try:
            stream = events(self.client, endpoint.url, body)
            async with asyncio.timeout(self.stage.timeout_s), aclosing(stream):
                async for event in stream:
                    completion.take(event)
        except TimeoutError as error:
            raise Trouble("slow", f"no whole answer in {self.stage.timeout_s:g} s") from error
        text, finish, num_tok, own = read_answer(completion, ids)
        return Reply(prompt, ids, temperature, text, finish, num_tok, own, endpoint.url, task.retried)

    def _trouble(self, endpoint: _Endpoint, began: int, task: _Task, found: Trouble) -> None:
        """Decides what a failed request means for its endpoint, and whether the prompt is asked again."""
        task.failed += found.kind in ("slow", "failed", "refused")
        # An endpoint that answered others refuses this prompt for good; one that never answered may refuse them all.
        hopeless = bool(endpoint.answered) and (found.kind == "refused" or task.failed > self.stage.retries)
        if not hopeless:
            task.retried += 1
            self.work.put_nowait(task)
            self._fail(endpoint, began, found)
            return
        reason = {"refused": "refused", "slow": "timed_out", "failed": "server_error"}.get(found.kind, "server_error")
        log.warning("prompt %s is dropped (%s): %s: %s", task.work[0].id, reason, endpoint.url, found)
        self._settle(task, Reply(*task.work, endpoint=endpoint.url, retried=task.retried, dropped=reason))

    def _fail(self, endpoint: _Endpoint, began: int, found: Trouble) -> None:
        """Counts a failure, once for all requests that were under way together, and sets the wait."""
        if endpoint.dead or began < endpoint.round:
            return
        endpoint.round += 1
        endpoint.failures += 1
        endpoint.said = str(found)
        # One that answers other prompts is only slowed down by the prompts that break it.
        mortal = found.kind in ("down", "slow") or not endpoint.answered
        if found.kind == "closed" or (mortal and endpoint.failures > self.stage.retries):
            endpoint.dead = True
            log.warning("endpoint %s is given up: %s", endpoint.url, found)
            if all(other.dead for other in self.endpoints):
                self.over = True
                self.news.set()
            return
        wait_s = max(found.wait_s, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (endpoint.failures - 1)))
        endpoint.ready_at = asyncio.get_running_loop().time() + wait_s
        log.info("endpoint %s: %s; waiting %.1f s", endpoint.url, found, wait_s)
