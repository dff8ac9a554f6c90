"""What bodies may hold together, how slowly they may come, and how much may be in them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.vlmserve.server.fake_engine import MODEL, WAIT_S, Served, make_served, real_server
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.server import body_counts
from vlmserve.server.body_budget import FREE_BYTES, BodyBudget
from vlmserve.server.body_counts import count_values
from vlmserve_common.errors import BadRequestError

URL = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PART = {"type": "text", "text": ""}


@pytest.fixture
def strict(checkpoint_folder: Path) -> Iterator[Served]:
    served = make_served(
        checkpoint_folder,
        max_json_values=40,
        max_messages_per_request=3,
        max_parts_per_request=4,
        max_body_mib=0.5,
        max_unfinished_bodies_mib=0.5,
        body_timeout_s=0.3,
    )
    yield served
    served.assert_idle()
    assert served.app.state.bodies.held == 0
    asyncio.run(served.frontend.close())


def refusal(served: Served, body: object) -> tuple[int, str]:
    client = TestClient(served.app, raise_server_exceptions=False)
    reply = client.post(URL, json=body)
    error = reply.json().get("error", {})
    return reply.status_code, f"{error.get('code')}: {error.get('message')}"


def test_messages_and_parts_are_counted_before_they_are_checked(strict: Served) -> None:
    message = {"role": "user", "content": [PART, PART]}
    assert refusal(strict, BODY | {"messages": [message, message]})[0] == 200
    status, told = refusal(strict, BODY | {"messages": [message, message, message]})
    assert (status, told) == (
        400,
        "too_many_parts: the request has 6 parts in its messages, the limit is 4 (setting --max-parts-per-request)",
    )
    status, told = refusal(strict, BODY | {"messages": [{"wrong": 1}] * 4})
    assert (status, told) == (
        400,
        "too_many_parts: the request has 4 messages, the limit is 3 (setting --max-messages-per-request)",
    )


def test_values_are_counted_before_the_body_is_read(strict: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ",{[" * 100
    assert refusal(strict, BODY | {"messages": [{"role": "user", "content": text[:90]}]})[0] == 200
    monkeypatch.setattr("pydantic_core.from_json", None)  # it is not called
    assert refusal(strict, BODY | {"unknown": [0] * 50}) == (
        400,
        "too_many_values: the request body has more values than 40 (setting --max-json-values)",
    )


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet=',[{"\\a\n', max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\,{', max_size=3), inner),
        max_leaves=20,
    ),
    st.integers(1, 9),
)
def test_texts_do_not_count(value: object, block: int) -> None:
    """Whatever stands in them, and wherever a block of the count ends."""
    body = json.dumps(value).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body)
    expected = sum(outside.count(mark) for mark in (b",", b"[", b"{"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_counts, "_BLOCK", block)
        assert count_values(body, 10**9) == expected


def test_the_budget_is_for_all_and_small_bodies_need_none() -> None:
    budget = BodyBudget(ServerSettings(engine=EngineArgs(model=""), max_body_mib=1, max_unfinished_bodies_mib=1))
    with budget.body() as one:
        one.add(bytes(2**20))
        assert budget.held == 2**20 - FREE_BYTES
        with budget.body() as other:
            other.add(bytes(2 * FREE_BYTES))
            with pytest.raises(BadRequestError, match=r"take 1048576 bytes together, the limit is 1048576 \(setting"):
                other.add(b"x")
            with budget.body() as small:
                small.add(bytes(FREE_BYTES))
        assert budget.held == 2**20 - FREE_BYTES
    assert budget.held == 0


def test_a_body_beyond_the_budget_is_told_to_come_again(strict: Served) -> None:
    """Another one holds it, and is not finished; small requests are answered meanwhile."""
    with real_server(strict.app) as port:
        links = []
        for _ in range(2):
            link = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
            link.sendall(HEAD + b"Content-Length: 500000\r\n\r\n" + b" " * 400_000)
            links.append(link)
        client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        data = json.dumps(BODY).encode()
        client.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        assert b"".join(iter(lambda: client.recv(65536), b"")).startswith(b"HTTP/1.1 200 ")
        answers = sorted(link.recv(65536) for link in links)
        assert answers[0].startswith(b"HTTP/1.1 408 ")  # the one that held it, in the end
        assert answers[1].startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answers[1]
        for link in (*links, client):
            link.close()


def test_a_body_that_comes_too_slowly(strict: Served) -> None:
    """It never stalls: there is a byte every moment."""
    with real_server(strict.app) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as link:
        link.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        link.settimeout(0.05)
        answer = b""
        while not answer:
            link.sendall(b" ")
            try:
                answer = link.recv(65536)
            except TimeoutError:
                continue
        link.settimeout(WAIT_S)
        answer += b"".join(iter(lambda: link.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the least is 500 a second (setting --min-body-bytes-per-s)" in answer
