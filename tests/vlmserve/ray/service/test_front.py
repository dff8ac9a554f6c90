"""The front without a cluster: what it sends to replicas, and what it does when they fail."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx2
import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from vlmserve.config.settings import ServerSettings, load_settings
from vlmserve.ray.service.choosing import Order
from vlmserve.ray.service.front import FrontApp, NoMetrics
from vlmserve.router.app import guarded

Item = str | list[dict[str, Any]] | Exception


class Answer:
    """What a call of a handle returns."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Item]:
        for item in self._items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """The handle of replicas that answer one order after the other with these items."""

    def __init__(self, *answers: Sequence[Item]) -> None:
        self.orders: list[Order] = []
        self.given: list[Answer] = []
        self._answers = list(answers)

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    @property
    def answer(self) -> Replicas:
        return self

    def remote(self, order: Order) -> Answer:
        self.orders.append(order)
        self.given.append(Answer(self._answers.pop(0)))
        return self.given[-1]


def answered(status: int = 200, body: bytes = b"{}", kind: bytes = b"application/json") -> list[dict[str, Any]]:
    start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}
    return [start, {"type": "http.response.body", "body": body}]


def begun(body: bytes, kind: bytes = b"text/event-stream") -> list[dict[str, Any]]:
    start, first = answered(body=body, kind=kind)
    return [start, first | {"more_body": True}]


LOST = ActorDiedError()


@pytest.fixture
def ask() -> Callable[..., httpx2.Response]:
    def send(replicas: Replicas, path: str, settings: ServerSettings | None = None, **request: Any) -> httpx2.Response:
        settings = settings or load_settings({})
        app = guarded(FrontApp(settings, replicas), settings, NoMetrics())

        async def run() -> httpx2.Response:
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                method = request.pop("method", "POST")
                return await client.request(method, path, **request)

        return asyncio.run(run())

    return send


CHAT = {"model": "m", "messages": [{"role": "user", "content": "word " * 100}]}


def test_an_order_has_the_request_and_what_to_choose_by(ask) -> None:
    replicas = Replicas(["a", answered(body=b'{"x": 1}')])
    answer = ask(replicas, "/v1/chat/completions?q=1", json=CHAT, headers={"x-request-id": "mine", "x-other": "y"})
    assert (answer.status_code, answer.json()) == (200, {"x": 1})
    [order] = replicas.orders
    assert json.loads(order.body) == CHAT
    assert len(order.demand.prefix) == 3
    assert order.number is None
    assert order.scope["path"] == "/v1/chat/completions"
    assert order.scope["query_string"] == b"q=1"
    headers = dict(order.scope["headers"])
    assert headers[b"x-request-id"] == b"mine"
    assert headers[b"x-other"] == b"y"


@pytest.mark.parametrize(
    ("method", "path", "body", "home"),
    [
        ("GET", "/v1/models", None, False),
        ("POST", "/v1/chat/completions", CHAT, False),
        ("GET", "/v1/files", None, True),
        ("GET", "/v1/files/file-1/content", None, True),
        ("POST", "/v1/batches", {"input_file_id": "file-1"}, True),
        ("POST", "/v1/responses", {"input": "x"}, True),
        ("GET", "/v1/filesystem", None, False),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"content": [{"type": "file", "file": {"file_id": "file-1"}}]}]},
            True,
        ),
    ],
)
def test_what_one_replica_has_is_asked_of_that(ask, method: str, path: str, body: Any, home: bool) -> None:
    replicas = Replicas(["a", answered()], ["b", answered()])
    ask(replicas, path, method=method, json=body)
    shared = {"database_url": "postgresql://x/y", "file_store_url": "s3://x"}
    ask(replicas, path, method=method, json=body, settings=load_settings(shared))
    assert [order.number for order in replicas.orders] == [0 if home else None, None]


def test_a_lost_replica_s_request_goes_to_another_one_once(ask) -> None:
    replicas = Replicas([LOST], ["b", answered()])
    assert ask(replicas, "/v1/chat/completions", json=CHAT).status_code == 200
    replicas = Replicas([LOST], [LOST])
    answer = ask(replicas, "/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert answer.headers["retry-after"]
    assert len(replicas.orders) == 2


def test_a_replica_that_cannot_answer_is_left_out_in_the_second_try(ask) -> None:
    replicas = Replicas(["a", answered(503, b'{"why": 1}')], ["b", answered(503, b'{"why": 2}')])
    answer = ask(replicas, "/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()) == (503, {"why": 2})
    assert [order.avoid for order in replicas.orders] == [(), ("a",)]
    assert replicas.given[0].cancelled


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_what_may_have_been_done_is_not_done_again(ask, path: str) -> None:
    replicas = Replicas(["a", LOST])
    answer = ask(replicas, path, content=b"{}", headers={"content-type": "application/json"})
    assert answer.status_code == 503
    assert "may have been done" in answer.json()["error"]["message"]
    assert len(replicas.orders) == 1


def test_a_stream_that_breaks_off_ends_with_an_error_event(ask) -> None:
    replicas = Replicas(["a", begun(b'data: {"x": 1}\n\n'), LOST])
    answer = ask(replicas, "/v1/chat/completions", json=CHAT | {"stream": True})
    first, last = answer.text.strip().split("\n\n")
    assert first == 'data: {"x": 1}'
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(replicas.orders) == 1


def test_any_other_answer_that_breaks_off_breaks_the_connection(ask) -> None:
    replicas = Replicas(["a", begun(b'{"x":', kind=b"application/json"), LOST])
    with pytest.raises(ConnectionError, match="in the middle of its answer"):
        ask(replicas, "/v1/chat/completions", json=CHAT)


def test_a_full_queue_of_serve_is_a_503(ask) -> None:
    error = BackPressureError(num_queued_requests=4, max_queued_requests=4)
    answer = ask(Replicas([error]), "/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


@pytest.mark.parametrize("path", ["/flush_cache", "/server_info"])
def test_what_is_one_replica_s_is_not_passed_on(ask, path: str) -> None:
    answer = ask(Replicas(), path, method="GET")
    assert answer.status_code == 404
    assert "several" in answer.json()["error"]["message"]


def test_bodies_are_limited_and_keys_checked_before_a_replica_is_asked(ask) -> None:
    settings = load_settings({"api_key": "sesame", "max_body_mib": 0.01, "max_file_bytes": 1000})
    key = {"authorization": "Bearer sesame"}
    assert ask(Replicas(), "/v1/chat/completions", settings, json=CHAT).status_code == 401
    large = CHAT | {"user": base64.b64encode(bytes(20_000)).decode()}
    assert ask(Replicas(), "/v1/chat/completions", settings, json=large, headers=key).status_code == 413
    files = {"file": ("x", bytes(2**20 + 2000))}
    answer = ask(Replicas(), "/v1/files", settings, files=files, headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    replicas = Replicas(["a", answered()])
    assert ask(replicas, "/v1/files", settings, files={"file": ("x", b"abc")}, headers=key).status_code == 200
    assert b"abc" in replicas.orders[0].body


def test_the_figures_of_all_replicas_come_together(ask) -> None:
    page = b"# TYPE x gauge\nx 1.0\n"
    replicas = Replicas(*([name, answered(body=page, kind=b"text/plain")] for name in "aba"))
    answer = ask(replicas, "/metrics", method="GET")
    assert answer.text.splitlines()[-2:] == ['x{server="a"} 1.0', 'x{server="b"} 1.0']
    assert [order.number for order in replicas.orders] == [0, 1, 2]
