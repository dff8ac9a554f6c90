"""A line in the log for every request, and an id in every answer."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import MODEL, make_served
from vlmserve.api.outermost import access

URL = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def logging_client(checkpoint_folder: Path) -> Iterator[TestClient]:
    """As with --log-level error: the lines come all the same."""
    served = make_served(checkpoint_folder, access_log=True, api_key="secret")
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    with TestClient(served.app, headers={"Authorization": "Bearer secret"}, raise_server_exceptions=False) as client:
        yield client
    asyncio.run(served.frontend.close())
    access.setLevel(logging.NOTSET)
    root.setLevel(before)


def test_every_request_is_a_line(logging_client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    replies = [
        logging_client.post(URL, json=BODY),
        logging_client.post(URL, json={**BODY, "stream": True}),
        logging_client.post(URL, json={**BODY, "temperature": 9}),
        logging_client.post(URL, json=BODY, headers={"Authorization": "Bearer other"}),
        logging_client.get("/v1/models?api_key=secret"),
        logging_client.get("/no%0Awhere%20else"),
    ]
    lines = [record.getMessage() for record in caplog.records if record.name == "vlmserve.access"]
    ids = [reply.headers["X-Request-Id"] for reply in replies]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"testclient:\d+ (GET|POST) \S+ \d+ \d+\.\d{3} s \S+", line) for line in lines)
    assert [re.sub(r"\S+ (.*) \S+ s (\S+)", r"\1 \2", line) for line in lines] == [
        f"POST {URL} 200 {ids[0]}",
        f"POST {URL} 200 {ids[1]}",
        f"POST {URL} 400 {ids[2]}",
        f"POST {URL} 401 {ids[3]}",
        f"GET /v1/models 200 {ids[4]}",
        f"GET /no%0Awhere%20else 404 {ids[5]}",
    ]
    assert ids[0] == replies[0].json()["id"]


def test_nothing_is_logged_unasked(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert client.get("/v1/models").headers["X-Request-Id"].startswith("req-")
    assert [record for record in caplog.records if record.name == "vlmserve.access"] == []
