"""What requests say of replicas reaches whoever routes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import MODEL, Served, serving

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
}


@pytest.fixture
def replicated(checkpoint_folder: Path) -> Iterator[Served]:
    with serving(checkpoint_folder, {"dp_size": 2, "max_running_requests": 2, "max_queued_requests": 3}) as served:
        yield served


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_may_choose(replicated: Served, route: str) -> None:
    body = {"model": MODEL, **ROUTES[route]}
    with TestClient(replicated.app) as client:
        for choice in ({}, {"data_parallel_rank": 0}, {"data_parallel_rank": 1}):
            assert client.post(route, json=body | choice).status_code == 200
        assert [request.data_parallel_rank for request in replicated.scheduler.requests] == [None, 0, 1]
        for rank, words in ((2, "below the number of replicas, which is 2 (setting --dp-size)"), (-1, "0"), ("1", "")):
            reply = client.post(route, json=body | {"data_parallel_rank": rank})
            assert reply.status_code == 400
            assert "data_parallel_rank" in reply.json()["error"]["param"]
            assert words in reply.json()["error"]["message"]
        assert len(replicated.scheduler.requests) == 3


def test_there_is_room_for_what_all_can_take(replicated: Served) -> None:
    body = {"model": MODEL, **ROUTES["/v1/chat/completions"]}
    with TestClient(replicated.app) as client:
        assert client.post("/v1/chat/completions", json=body | {"n": 10}).status_code == 200
        assert client.post("/v1/chat/completions", json=body | {"n": 11}).status_code == 429
