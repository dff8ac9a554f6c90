"""A replica's answers to fronts, without a cluster and an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from vlmserve.config.settings import load_settings
from vlmserve.ray.service.choosing import Order
from vlmserve.ray.service.replica import ReplicaPlan, Server, _listen
from vlmserve.routing.replicas import Demand

ORDER = Order(demand=Demand(rids=("1",)), number=None, scope={"type": "http", "path": "/"}, body=b"body")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="abc"), rank=None)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    plan = ReplicaPlan(
        version="0", settings=load_settings({}), workers={}, slots=1, target_use=1.0, bundles=[{"CPU": 1.0}]
    )
    return Server(plan)


def test_messages_come_as_they_are_made_behind_the_replica_s_name(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "path": scope["path"]})
        await asyncio.sleep(0)
        for part in (message["body"], b"end"):
            await send({"type": "http.response.body", "body": part})

    async def run() -> list[Any]:
        server._takes_requests(app)
        return [item async for item in server.answer(ORDER)]

    name, *batches = asyncio.run(run())
    assert name == "abc"
    whole = [message for batch in batches for message in batch]
    assert [message.get("body", message.get("path")) for message in whole] == ["/", b"body", b"end"]
    assert len(batches) > 1, "the first one did not wait for the rest"
    assert server.record_routing_stats()["requests"] == 0


def test_a_client_that_leaves_ends_the_work(server: Server) -> None:
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})
        try:
            await receive()
            await receive()
        finally:
            ended.append(scope["path"])

    async def run() -> None:
        server._takes_requests(app)
        answer = server.answer(ORDER)
        assert await anext(answer) == "abc"
        await anext(answer)
        assert server.record_routing_stats()["requests"] == 1
        await answer.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert ended == ["/"]

    asyncio.run(run())


def test_an_application_that_fails_fails_the_call(server: Server) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError("no")

    async def run() -> None:
        server._takes_requests(app)
        async for _ in server.answer(ORDER):
            pass

    with pytest.raises(LookupError):
        asyncio.run(run())


def test_servers_for_others_have_ports_of_their_own() -> None:
    assert _listen("10.0.0.1", "127.0.0.1:8998", 0, 2) == "10.0.0.1:8998"
    assert _listen("10.0.0.1", "127.0.0.1:8998", 3, 2) == "10.0.0.1:9004"
    assert _listen("10.0.0.1", "127.0.0.1:0", 3, 2) == "10.0.0.1:0"
