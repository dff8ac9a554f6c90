"""GET /: what the page tells, to whom, and that a browser loads nothing else for it."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from tests.vlmserve.api.fake_engine import CONTEXT, MODEL
from vlmserve import __version__

FACTS = {
    "name": "vlmserve",
    "version": __version__,
    "model": MODEL,
    "family": "qwen2_vl",
    "max_model_len": CONTEXT,
    "docs": "/docs",
}


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("accept", ["text/html,application/xhtml+xml,*/*;q=0.8", "*/*", "text/html, application/json"])
def test_it_shows_what_is_served(client, accept):
    reply = client.get("/", headers={"Accept": accept})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    for text in (f'<h1 id="model">{MODEL}</h1>', "qwen2_vl", f"{CONTEXT:,} tokens", __version__, '<a href="docs">'):
        assert text in reply.text, text
    assert "{{" not in reply.text


def test_those_who_ask_for_json_get_json(client):
    reply = client.get("/", headers={"Accept": "application/json"})
    assert (reply.status_code, reply.json(), reply.headers["vary"]) == (200, FACTS, "Accept")


def test_head_and_other_methods(client):
    head = client.head("/")
    assert (head.status_code, head.headers["content-type"]) == (200, "text/html; charset=utf-8")
    refused = client.post("/", json={})
    assert (refused.status_code, refused.json()["error"]["type"]) == (405, "invalid_request_error")


def test_a_browser_runs_what_is_in_the_page_and_loads_nothing(client):
    reply = client.get("/")
    sources = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    for element in ("script", "style"):
        [text] = re.findall(f"<{element}>(.*?)</{element}>", reply.text, re.DOTALL)
        assert sources.pop(f"{element}-src") == hash_of(text)
    assert {sources.pop("img-src"), sources.pop("media-src")} == {"data:"}
    assert sources.pop("connect-src") == "'self'"
    assert set(sources) == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(sources.values()) == {"'none'"}
    assert (reply.headers["x-content-type-options"], reply.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert not re.search(
        r"//[\w.]+\.|@import|url\(|innerHTML|insertAdjacentHTML|document\.write| on\w+=| style=", reply.text
    )


def test_a_name_is_text(serve, monkeypatch):
    name = '<script>x("{{version}}")</script>'
    monkeypatch.setattr("tests.vlmserve.api.fake_engine.MODEL", name)
    _served, client = serve()
    page = client.get("/").text
    assert '<h1 id="model">&lt;script&gt;x(&quot;{{version}}&quot;)&lt;/script&gt;</h1>' in page
    assert client.get("/", headers={"Accept": "application/json"}).json()["model"] == name


def test_with_keys_the_page_is_public_and_asks_for_one(serve):
    _served, client = serve(api_key="secret")
    page = client.get("/", headers={"Host": "anything.example"})
    assert page.status_code == 200
    assert re.search(r'<label id="access" >API key <input id="key" type="password"', page.text)
    assert "secret" not in page.text
    assert client.get("/v1/models").status_code == 401


def test_without_keys_it_is_there_for_allowed_hosts_only(client):
    assert '<label id="access" hidden>' in client.get("/").text
    refused = client.get("/", headers={"Host": "evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
