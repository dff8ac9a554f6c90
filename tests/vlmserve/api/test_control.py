"""The endpoints of operators, over a fake engine under the real control."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import BODY, CHAT, MODEL, WAIT_S, Served
from tests.vlmserve.api.test_operations import assert_error
from vlmserve import __version__
from vlmserve.api import control


def test_info_has_no_secrets(serve) -> None:
    _, client = serve(api_key="sesame", engine={"page_size": 8})
    with client:
        reply = client.get("/server_info", headers={"Authorization": "Bearer sesame"})
    assert "sesame" not in reply.text
    info = reply.json()
    assert (info["version"], info["model"], info["paused"]) == (__version__, MODEL, False)
    assert (info["settings"]["api_key"], info["settings"]["admin_api_key"]) == ("set", None)
    assert info["settings"]["page_size"] == 8
    assert info["scheduler"]["kv_total_tokens"] == 100
    assert info["uptime_s"] >= 0
    assert info["defaults"] == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_pixels": 784,
        "max_pixels": 50176,
        "fps": 2.0,
    }


@contextlib.contextmanager
def running(client: TestClient, served: Served) -> Iterator[Future[Any]]:
    """A request of the id "mine" at the engine, until it is aborted."""
    served.scheduler.pause_after = 1
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.post, CHAT, json=BODY | {"rid": "mine"})
        served.scheduler.wait_until(lambda: served.scheduler.num_active)
        try:
            yield reply
        finally:
            client.post("/abort_request", json={"abort_all": True})


def test_aborting(client: TestClient, served: Served) -> None:
    with running(client, served) as reply:
        assert_error(client.post("/abort_request", json={"rid": "other"}), 404, "not_found_error")
        assert client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": ["mine"]}
        ended = reply.result(WAIT_S)
    assert_error(ended, 499)
    assert ended.json()["error"]["code"] == "request_aborted"
    with running(client, served) as reply:
        assert client.post("/abort_request", json={"abort_all": True}).json() == {"aborted": ["mine"]}
        assert reply.result(WAIT_S).status_code == 499
    assert client.post("/abort_request", json={"abort_all": True}).json() == {"aborted": []}
    for body in ({}, {"rid": "a", "abort_all": True}, {"abort_all": False}, {"rid": 1}, {"all": True}):
        assert_error(client.post("/abort_request", json=body), 400)


def test_the_answer_has_the_client_s_id_and_a_second_one_is_refused(client: TestClient, served: Served) -> None:
    with running(client, served):
        second = client.post(CHAT, json=BODY | {"rid": "mine"})
        assert_error(second, 409)
        assert second.json()["error"]["param"] == "rid"
    served.scheduler.pause_after = None
    reply = client.post(CHAT, json=BODY | {"rid": "mine"})
    assert (reply.json()["id"], reply.headers["x-request-id"]) == ("mine", "mine")
    for rid in ("", "a b", "é", "x" * 129, 1):
        assert_error(client.post(CHAT, json=BODY | {"rid": rid}), 400)


def test_a_timeout_is_told_whole_or_in_the_stream(client: TestClient, served: Served) -> None:
    served.scheduler.pause_after = 0
    reply = client.post(CHAT, json=BODY | {"timeout": 0.02})
    assert_error(reply, 504, "server_error")
    assert reply.json()["error"]["code"] == "request_timeout"
    served.scheduler.pause_after = 1
    with client.stream("POST", CHAT, json=BODY | {"timeout": 0.5, "stream": True}) as reply:
        assert reply.status_code == 200
        *_, error, done, _ = "".join(reply.iter_text()).split("\n\n")
    assert '"code":"request_timeout"' in error
    assert done == "data: [DONE]"
    for timeout in (0, -1, "1", 1e9):
        assert_error(client.post(CHAT, json=BODY | {"timeout": timeout}), 400)


def test_profiling_needs_its_folder(serve, tmp_path: Path) -> None:
    _, client = serve()
    with client:
        assert "--profile-dir" in client.post("/start_profile").json()["error"]["message"]
    _, client = serve(profile_dir=str(tmp_path))
    with client:
        assert_error(client.post("/start_profile", json={"num_steps": 0}), 400)
        assert_error(client.post("/stop_profile"), 409)


def test_an_engine_that_does_not_answer(client: TestClient, served: Served, monkeypatch) -> None:
    monkeypatch.setattr(served.scheduler.control, "handle", lambda _: 1 // 0)
    assert client.post("/flush_cache").status_code == 500
    served.frontend.suspend("the engine is stopped")
    assert_error(client.post("/flush_cache"), 503, "server_error")
    assert_error(client.get("/health"), 503, "server_error")
    served.frontend.suspend(None)
    assert client.get("/health").status_code == 200


def test_an_engine_at_a_long_step(serve, monkeypatch) -> None:
    served, _client = serve()
    monkeypatch.setattr(control, "ANSWER_S", 0.02)

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    api = control.ControlApi(served.frontend.manager, never, None, MODEL)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"still at a step after 0\.02 s"):
        asyncio.run(api.flush_cache())
