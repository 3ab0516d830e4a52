"""Addresses, keys, and what an answer's status or event means; no model is needed for these."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from distill.endpoint import Completion, EndpointError, Trouble, api, check, find_model, headers, root, trouble
from distill.recipe import RecipeError, Responses, load_recipe

REQUEST = httpx2.Request("POST", "http://host/v1/chat/completions", headers={"Authorization": "Bearer sk-secret"})


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_one_address_in_four_spellings(url: str) -> None:
    assert api(url) == "http://host:8000/v1" and root(url) == "http://host:8000"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "host:8000",
        "http://",
        "http://host:99999",
        "http://user:word@host",
        "http://host?key=word",
        "http://host#word",
        "http://ho st",
        "http://host\\n",
        "http://[::1",
        "",
    ],
)
def test_only_plain_addresses_and_no_password_in_the_message(url: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f'name: a\ndraft: {{num_layers: 2}}\nresponses: {{server: ["{url}"]}}\n')
    with pytest.raises(RecipeError, match=r"responses\.server.*must be http\(s\)://HOST") as raised:
        load_recipe(path)
    assert "word" not in str(raised.value).replace("password", "")


def test_a_key_in_the_place_of_its_variable_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: a\ndraft: {num_layers: 2}\nresponses: {api_key_env: sk-secret}\n")
    with pytest.raises(RecipeError, match=r"responses\.api_key_env must be the name") as raised:
        load_recipe(path)
    assert "sk-secret" not in str(raised.value)


def test_an_address_is_kept_as_it_was_written() -> None:
    assert Responses(server=("https://host/x/v1/",)).server == ("https://host/x/v1/",)
    with pytest.raises(ValueError, match="names a value twice"):
        Responses(server=("http://a", "http://a"))
    with pytest.raises(ValueError, match="writes the target's answers"):
        Responses(server=("http://a",), source="reference")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "refused"), (413, "refused"), (422, "refused"), (401, "closed"), (404, "closed"), (302, "closed")]
    + [(429, "down"), (502, "down"), (503, "down"), (504, "down"), (500, "failed"), (501, "failed")],
)
def test_what_a_status_means(status: int, kind: str) -> None:
    with pytest.raises(Trouble, match=rf"^HTTP {status}: your key \*\*\* is bad$") as raised:
        check(httpx2.Response(status, text="your key\n sk-secret is bad", request=REQUEST))
    assert raised.value.kind == kind and raised.value.wait_s == 0


def test_a_server_may_ask_to_wait_but_not_for_ever() -> None:
    for asked, waited in (("3", 3.0), ("9999", 60.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0)):
        with pytest.raises(Trouble) as raised:
            check(httpx2.Response(429, headers={"Retry-After": asked}, request=REQUEST))
        assert raised.value.wait_s == waited


def test_what_a_broken_connection_means() -> None:
    assert trouble(httpx2.ReadTimeout("late")).kind == "slow"
    assert trouble(httpx2.ConnectTimeout("late")).kind == "down"
    assert trouble(httpx2.ConnectError("refused")).kind == "down"
    assert str(trouble(httpx2.ReadError(""))) == "ReadError"


def test_a_key_must_be_there_and_fit_into_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    assert headers(None) == {}
    monkeypatch.setenv("OUR_KEY", " sk-secret\n")
    assert headers("OUR_KEY") == {"Authorization": "Bearer sk-secret"}
    for bad in ("", "  ", "sk-\nsecret", "sk-süß"):
        monkeypatch.setenv("OUR_KEY", bad)
        with pytest.raises(EndpointError, match="OUR_KEY") as raised:
            headers("OUR_KEY")
        assert "sk-" not in str(raised.value)


def test_events_add_up() -> None:
    done = Completion()
    assert not done.take({"choices": [{"delta": {"role": "assistant"}}]})
    assert done.take({"choices": [{"delta": {"content": " a"}}]})
    assert done.take({"choices": [{"delta": {"content": "b "}, "finish_reason": None}], "usage": None})
    assert not done.take({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"draft_n": 3}})
    assert not done.take({"choices": [], "usage": {"prompt_tokens": 3}})
    assert (done.text, done.finish, done.usage) == (" ab ", "stop", {"prompt_tokens": 3})
    assert done.timings == {"draft_n": 3} and not done.reasoning
    assert done.take({"choices": [{"delta": {"reasoning_content": "hm"}}]}) and done.reasoning


@pytest.mark.parametrize("event", [{"error": {"message": "out of memory"}}, {"choices": 3}, {"choices": [1]}, {}])
def test_what_is_no_part_of_an_answer(event: dict[str, Any]) -> None:
    with pytest.raises(Trouble) as raised:
        Completion().take(event)
    assert raised.value.kind == "failed"


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (5, ConnectionError, "its list of models is no list: '5'"),
        ({"id": "a"}, ConnectionError, "its list of models is no list"),
        ("a", ConnectionError, "its list of models is no list: 'a'"),
        (None, EndpointError, "lists 0 models"),
        ([{"id": "a"}, {"id": "b"}], EndpointError, r"lists 2 models \(a, b\)"),
        ([5, {"id": "a"}], None, "a"),
    ],
)
def test_a_list_of_models_that_is_none_is_told_with_the_server(
    data: object, error: type[Exception] | None, words: str
) -> None:
    class Lister(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": data}).encode())

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = HTTPServer(("127.0.0.1", 0), Lister)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        if error is None:
            assert find_model([url], None) == words
        else:
            with pytest.raises(error, match=f"(?s){url}.*{words}"):
                find_model([url], None)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
