"""A server without keys is not for web pages; with them, pages that are allowed may read its answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import CHAT, MODEL

ROOT = Path(__file__).resolve().parents[3]
BODY = b'{"model": "%s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}' % MODEL.encode()
JSON = {"Content-Type": "application/json"}
Ask = Callable[..., tuple[int, str | None]]


@pytest.fixture
def ask_with(serve) -> Callable[..., Ask]:
    def make(**settings: object) -> Ask:
        _served, client = serve(**{"allowed_hosts": None, **settings})
        client.base_url = "http://localhost:8000"

        def ask(**headers: str) -> tuple[int, str | None]:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            reply = client.post(CHAT, content=BODY, headers=JSON | named)
            code = None if reply.status_code == 200 else reply.json()["error"]["code"]
            return reply.status_code, code

        return ask

    return make


def test_hosts_that_are_right(ask_with: Callable[..., Ask]) -> None:
    ask = ask_with()
    for host in ("localhost", "LOCALHOST:8000", "localhost.:8000", "a.localhost"):
        assert ask(Host=host)[0] == 200, host
    for address in ("127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "10.0.0.5"):
        assert ask(Host=address)[0] == 200, address


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"]
)
def test_hosts_that_are_not(ask_with: Callable[..., Ask], host: str) -> None:
    assert ask_with()(Host=host) == (403, "host_not_allowed")
    assert ask_with(api_key="secret")(Host=host) == (401, "invalid_api_key")
    assert ask_with(api_key="secret")(Host=host, Authorization="Bearer secret")[0] == 200
    assert ask_with(allowed_hosts="*")(Host=host)[0] == 200


def test_hosts_that_are_allowed(ask_with: Callable[..., Ask]) -> None:
    ask = ask_with(allowed_hosts="vlm,.example.com", host="server.lan")
    assert [ask(Host=host)[0] for host in ("vlm:8000", "a.example.com", "server.lan:80")] == [200, 200, 200]
    assert [ask(Host=host)[0] for host in ("example.com", "a.vlm", "aexample.com")] == [403, 403, 403]


def test_nginx_as_documented_is_let_through(ask_with: Callable[..., Ask]) -> None:
    """It passes on the name that clients asked for."""
    told = (ROOT / "deploy" / "nginx.conf").read_text()
    assert "proxy_set_header Host $host;" in told
    [name] = set(re.findall(r"server_name (\S+);", told))
    [hosts] = re.findall(r"--allowed-hosts (\S+)", told)
    assert f"--allowed-hosts {hosts}" in (ROOT / "docs" / "deployment.md").read_text()
    assert ask_with()(Host=name) == (403, "host_not_allowed")
    assert ask_with(allowed_hosts=hosts)(Host=name)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:3000", "https://localhost:8000.x", "null"])
def test_foreign_pages(ask_with: Callable[..., Ask], origin: str) -> None:
    assert ask_with()(Origin=origin) == (403, "origin_not_allowed")
    assert ask_with(allowed_origins=f"https://a.example,{origin}")(Origin=origin)[0] == 200
    assert ask_with(allowed_origins="*")(Origin=origin)[0] == 200
    assert ask_with(api_key="secret")(Origin=origin, Authorization="Bearer secret")[0] == 200


def test_its_own_pages(ask_with: Callable[..., Ask]) -> None:
    ask = ask_with()
    assert ask(Origin="http://localhost:8000")[0] == 200
    assert ask(Host="localhost", Origin="http://localhost")[0] == 200
    assert ask(Host="localhost:80", Origin="http://localhost")[0] == 200
    assert ask(Host="127.0.0.1:8000", Origin="http://localhost:8000")[0] == 403


@pytest.mark.parametrize("kind", ["text/plain", "text/plain; charset=utf-8", "application/x-www-form-urlencoded"])
def test_types_that_pages_may_send(ask_with: Callable[..., Ask], kind: str) -> None:
    assert ask_with()(Content_Type=kind) == (415, "unsupported_media_type")
    assert ask_with(api_key="k")(Content_Type=kind, Authorization="Bearer k")[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_path_that_is_not_there_is_not_found_whatever_the_body(serve, kind: str) -> None:
    _served, client = serve(allowed_hosts=None)
    client.base_url = "http://localhost:8000"
    for path, status in (("/api/generate", 404), ("/v1/chat/completion", 404), ("/v1/models", 405), (CHAT, 415)):
        for body in (b"{", b'{"model": 1}', b"a=1&b=2"):
            assert client.post(path, content=body, headers={"Content-Type": kind}).status_code == status


def test_probes_ask_by_any_name(client: TestClient) -> None:
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 200
    assert client.get("/metrics", headers={"Host": "evil.example"}).status_code == 403


def test_a_page_that_is_allowed_can_read_the_answer(serve) -> None:
    """Also one that sends a key, which it must ask for first."""
    _served, client = serve(api_key="secret", allowed_origins="https://app.example")
    page = {"Origin": "https://app.example"}
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    asked = client.options(CHAT, headers=page | wish)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://app.example")
    reply = client.post(CHAT, content=BODY, headers=page | JSON | {"Authorization": "Bearer secret"})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://app.example")
    other = client.options(CHAT, headers={"Origin": "https://evil.example"} | wish)
    assert "access-control-allow-origin" not in other.headers
