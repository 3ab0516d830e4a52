"""An OpenAI-compatible endpoint: its address and key, the models it lists, a streamed answer, what failures mean."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2

CONNECT_S = 10.0
# down: it is not there, or asks to wait; slow: no answer in time; failed: it broke over this request;
# refused: it will not take this request; closed: it takes none (address, key or model is wrong).
Kind = Literal["down", "slow", "failed", "refused", "closed"]
BUSY = (429, 502, 503, 504)
CLOSED = (401, 403, 404, 405)


class EndpointError(ValueError):
    """An endpoint that can not be asked as the recipe says."""


class Trouble(Exception):
    """A request without an answer.

    Attributes:
        kind: what it means for the request and for the endpoint.
        wait_s: how long the endpoint asked to be left alone.
        unsent: there was no connection, so the request was not sent.
    """

    def __init__(self, kind: Kind, text: str, wait_s: float = 0.0, unsent: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.wait_s = wait_s
        self.unsent = unsent


@dataclass
class Completion:
    """A chat completion, put together from its events.

    Attributes:
        text: the answer so far.
        finish: finish_reason; "" while there is none.
        usage, timings: as the server gives them (usage of OpenAI, timings of llama-server); empty without.
        reasoning: the server cuts reasoning out of the answer.
        token_ids: the answer's ids so far, where the server gives them (`return_token_ids` of vLLM).
        prompt_ids: the prompt's ids, where it gives them; None without.
    """

    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    reasoning: bool = False
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None

    def take(self, event: dict[str, Any]) -> bool:
        """Adds one event; does it carry a piece of the answer?

        Raises:
            Trouble: the event is an error, or no part of a completion.
        """
        if "error" in event:
            raise Trouble("failed", f"the server broke off: {json.dumps(event['error'])[:300]}")
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        if event.get("prompt_token_ids") is not None:
            self.prompt_ids = _ids(event["prompt_token_ids"])
        try:
            if not event["choices"]:
                return False  # usage alone
            choice = event["choices"][0]
            delta = choice.get("delta") or {}
            piece, thought = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning")
            self.finish = choice.get("finish_reason") or self.finish
            ids = choice.get("token_ids") or []
        except (AttributeError, LookupError, TypeError) as error:
            raise Trouble("failed", f"no event of a chat completion: {json.dumps(event)[:200]}") from error
        self.text += piece
        self.token_ids += _ids(ids)
        self.reasoning = self.reasoning or bool(thought)
        return bool(piece or thought)


def _ids(value: object) -> list[int]:
    if isinstance(value, list) and all(type(index) is int for index in value):
        return value
    raise Trouble("failed", f"token ids are no list of numbers: {json.dumps(value)[:200]}")


def api(url: str) -> str:
    """The address below which the API lies: http://host:8000 and http://host:8000/v1/ are the same."""
    return root(url) + "/v1"


def root(url: str) -> str:
    """The address without /v1, below which a server shows its metrics."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def headers(variable: str | None) -> dict[str, str]:
    """The authorization header with the key that an environment variable holds; nothing without a variable.

    Raises:
        EndpointError: the variable is not set, or holds what no header may. The value is never shown.
    """
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise EndpointError(f"the environment variable {variable} holds no key; set it, or drop api_key_env")
    if not (key.isascii() and key.isprintable()):
        raise EndpointError(f"the environment variable {variable} holds characters that no key has; set it again")
    return {"Authorization": f"Bearer {key}"}


def limits(timeout_s: float) -> httpx2.Timeout:
    """Time-outs of a request: `timeout_s` between two pieces of the answer, ten seconds at most to connect."""
    return httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))


def trouble(error: httpx2.HTTPError) -> Trouble:
    """What a failure below HTTP means."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
        return Trouble("slow", text)
    return Trouble("down", text, unsent=isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout))


def check(response: httpx2.Response) -> None:
    """Passes an answer with status 200 whose body was read.

    Raises:
        Trouble: another status, with the server's own words.
    """
    status = response.status_code
    if status == 200:
        return
    words = redact(" ".join(response.text.split()), response)
    text = f"HTTP {status}: {words[:300]}"
    if status in BUSY:
        after = response.headers.get("retry-after", "")
        raise Trouble("down", text, min(60.0, float(after)) if after.isdecimal() else 0.0)
    if status in CLOSED or status < 400:
        raise Trouble("closed", text)
    raise Trouble("refused" if status < 500 else "failed", text)


def redact(text: str, response: httpx2.Response) -> str:
    """The text without the key that was sent, which some servers repeat."""
    key = response.request.headers.get("authorization", "").removeprefix("Bearer ")
    return text.replace(key, "***") if key else text


def object_of(response: httpx2.Response) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        Trouble: it is none.
    """
    try:
        value = response.json()
    except ValueError as error:
        raise Trouble("failed", f"the answer is no JSON: {response.text[:80]!r}") from error
    if not isinstance(value, dict):
        raise Trouble("failed", f"the answer is no JSON object: {response.text[:80]!r}")
    return value


async def events(client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Asks for a chat completion as a stream; its events, as they come.

    Streams keep white space at the ends of an answer, which some servers strip from a whole one.

    Raises:
        Trouble: no answer, or none to read.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", api(url) + "/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
            check(response)
            rest = b""
            # Not by text lines: those also end at characters that JSON may hold as they are (U+2028, U+0085).
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if (event := _event(line)) is not None:
                        yield event
            if (event := _event(rest)) is not None:
                yield event
    except httpx2.HTTPError as error:
        raise trouble(error) from error


def _event(line: bytes) -> dict[str, Any] | None:
    """The object of a data line; None for what carries none."""
    name, _, data = line.partition(b":")
    data = data.strip()
    if name != b"data" or data in (b"", b"[DONE]"):
        return None
    try:
        event = json.loads(data)
    except ValueError as error:
        raise Trouble("failed", f"an event is no JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise Trouble("failed", f"an event is no JSON object: {data[:80]!r}")
    return event


def listed_models(client: httpx2.Client, url: str) -> list[str]:
    """Names of the models that an endpoint lists.

    Raises:
        Trouble: it can not be asked.
    """
    try:
        response = client.get(api(url) + "/models")
    except httpx2.HTTPError as error:
        raise trouble(error) from error
    check(response)
    data = object_of(response).get("data")
    if data is None:
        return []
    if not isinstance(data, list):
        raise Trouble("failed", f"its list of models is no list: {str(data)[:80]!r}")
    return [str(item["id"]) for item in data if isinstance(item, dict) and "id" in item]


def find_model(urls: Sequence[str], variable: str | None) -> str:
    """The name of the one model that the first endpoint to answer lists.

    Args:
        urls: endpoints, asked in turn.
        variable: of the API key.

    Raises:
        EndpointError: it lists none or several.
        ConnectionError: none answers.
    """
    said = []
    with httpx2.Client(headers=headers(variable), timeout=limits(CONNECT_S)) as client:
        for url in urls:
            try:
                names = listed_models(client, url)
            except Trouble as found:
                said.append(f"{url}: {found}")
                continue
            if len(names) != 1:
                shown = ", ".join(names[:5]) or "none"
                raise EndpointError(f"{url} lists {len(names)} models ({shown}); name the one to ask for")
            return names[0]
    raise ConnectionError("no endpoint answers:\n" + "\n".join(f"  {line}" for line in said))
