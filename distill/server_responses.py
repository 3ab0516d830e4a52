"""The target's answers from OpenAI-compatible endpoints: any number of them, any of which may die.

Endpoints share one queue of prompts. A request that an endpoint could not answer goes back into it; an endpoint that
keeps failing waits ever longer and is given up at last. What comes back is text, so it is tokenised again; the number
of prompt tokens shows whether the endpoint's chat template is the target's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from distill.completion import Reply, read_answer
from distill.endpoint import Completion, EndpointError, Trouble, events, find_model, headers, limits
from distill.prompt import Prompt
from distill.schema import Responses
from distill.tokens import with_system

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0

Work = tuple[Prompt, list[int], float]  # a prompt, its ids, its temperature


class ServersDown(ConnectionError):
    """Every endpoint was given up before all prompts were answered."""


@dataclass
class _Task:
    work: Work
    retried: int = 0
    failed: int = 0  # failures that may be the prompt's own


@dataclass
class _Endpoint:
    url: str
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


def ask(work: Sequence[Work], stage: Responses, model: str, seed: int, system: str | None) -> Iterator[Reply]:
    """Sends every prompt to some endpoint; what comes back, in the order in which it does.

    Endpoints are only served while the caller waits for the next reply, so a slow caller slows them down.

    Args:
        work: prompts, their ids and temperatures.
        stage: endpoints, lengths, sampler.
        model: the name to ask for.
        seed: each request's own seed comes from it and the prompt's id.
        system: system message of prompts that have none.

    Yields:
        one reply for each prompt.

    Raises:
        EndpointError: the API key is missing.
        ServersDown: every endpoint was given up; what was not yielded was not answered.
    """
    if not work:
        return
    fleet = _Fleet(stage, model, seed, system)
    with asyncio.Runner() as runner:
        runner.run(fleet.start(work))
        for left in range(len(work), 0, -1):
            yield runner.run(fleet.next(left))
        runner.run(fleet.stop())


@dataclass
class _Fleet:
    """The endpoints, their workers, the prompts to ask and the replies."""

    stage: Responses
    model: str
    seed: int
    system: str | None
    endpoints: list[_Endpoint] = field(init=False)

    async def start(self, work: Sequence[Work]) -> None:
        stage = self.stage
        self.endpoints = [_Endpoint(url) for url in stage.server]
        num = stage.concurrency * len(self.endpoints)
        self.client = httpx2.AsyncClient(
            headers=headers(stage.api_key_env),
            timeout=limits(stage.timeout_s),
            limits=httpx2.Limits(max_connections=num, max_keepalive_connections=num),
        )
        self.work: asyncio.Queue[_Task] = asyncio.Queue()
        for one in work:
            self.work.put_nowait(_Task(one))
        self.replies: asyncio.Queue[Reply] = asyncio.Queue(num)
        self.over = asyncio.Event()
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

    async def next(self, left: int) -> Reply:
        """The next reply; `left` prompts have none yet."""
        get = asyncio.create_task(self.replies.get())
        over = asyncio.create_task(self.over.wait())
        await asyncio.wait({get, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if get.done():
            return get.result()
        get.cancel()
        if self.bug is not None:
            raise self.bug
        lines = "\n".join(f"  {endpoint.url}: {endpoint.said}" for endpoint in self.endpoints)
        raise ServersDown(
            f"all {len(self.endpoints)} endpoints of responses.server were given up, {left} prompts are not answered:\n"
            f"{lines}\nanswers so far are kept; bring an endpoint back and resume the run"
        )

    def _ended(self, worker: asyncio.Task[None]) -> None:
        """A worker that raised would be waited for in vain."""
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self.bug = error
            self.over.set()

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
            began = endpoint.round
            try:
                reply = await self._request(endpoint, task)
            except Trouble as found:
                await self._trouble(endpoint, began, task, found)
                continue
            endpoint.answered += 1
            endpoint.failures = 0
            await self.replies.put(reply)

    async def _request(self, endpoint: _Endpoint, task: _Task) -> Reply:
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
        completion = Completion()
        try:
            stream = events(self.client, endpoint.url, body)
            async with asyncio.timeout(self.stage.timeout_s), aclosing(stream):
                async for event in stream:
                    completion.take(event)
        except TimeoutError as error:
            raise Trouble("slow", f"no whole answer in {self.stage.timeout_s:g} s") from error
        text, finish, num_tok = read_answer(completion, len(ids))
        return Reply(prompt, ids, temperature, text, finish, num_tok, endpoint.url, task.retried)

    async def _trouble(self, endpoint: _Endpoint, began: int, task: _Task, found: Trouble) -> None:
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
        reply = Reply(*task.work, endpoint=endpoint.url, retried=task.retried, dropped=reason)
        await self.replies.put(reply)

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
                self.over.set()
            return
        wait_s = max(found.wait_s, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (endpoint.failures - 1)))
        endpoint.ready_at = asyncio.get_running_loop().time() + wait_s
        log.info("endpoint %s: %s; waiting %.1f s", endpoint.url, found, wait_s)
