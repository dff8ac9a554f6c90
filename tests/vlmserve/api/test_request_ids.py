"""The id of a request: in headers, answers, the engine's names and the log."""

from __future__ import annotations

import logging
import re

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import MODEL, Served
from vlmserve.api.outermost import requests
from vlmserve.frontend.live_requests import Admission
from vlmserve_common.logs import configure_logging, request_id

URL = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def test_the_clients_own_is_kept_and_the_engines_are_different(client: TestClient, served: Served) -> None:
    replies = [client.post(URL, json=BODY, headers={"x-request-id": "job-7.a"}) for _ in range(2)]
    assert [reply.headers["X-Request-Id"] for reply in replies] == ["job-7.a"] * 2
    rids = [request.rid for request in served.scheduler.requests]
    assert len(set(rids)) == 2
    assert all(re.fullmatch(r"chatcmpl-job-7\.a-[0-9a-f]{8}-0", rid) for rid in rids)
    assert [reply.json()["id"] + "-0" for reply in replies] == rids


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 429, 500, 503])
def test_errors_have_it_too(serve, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    served, client = serve(api_key="key", max_body_mib=0.001)
    manager = served.frontend.manager
    monkeypatch.setattr(manager._live, "_admission", Admission(max_pending=1, setting="--x"))
    if status == 500:
        monkeypatch.delattr(manager.builder, "limits")
    if status == 503:
        manager.fail("it is gone")
    body = {400: {"temperature": 9}, 404: {"model": "other"}, 413: {"stop": "x" * 2000}, 429: {"n": 128}}.get(status)
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer wrong" if status == 401 else "Bearer key"}
    with client:
        method = "DELETE" if status == 405 else "POST"
        reply = client.request(method, URL, json={**BODY, **(body or {})}, headers=headers)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert reply.headers["X-Request-Id"] == "mine"


@pytest.mark.parametrize("odd", ["", "a b", "x" * 129, "-x", "a\tb", '"', "{}", "é"])
def test_one_that_could_spoil_a_log_is_not(client: TestClient, odd: str) -> None:
    reply = client.get("/v1/models", headers={"X-Request-Id": odd.encode("latin-1")})
    assert re.fullmatch(r"req-[0-9a-f]{32}", reply.headers["X-Request-Id"])


def test_lines_about_a_request_begin_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("info", "api")
        log = logging.getLogger("somewhere")
        log.info("nobody's")
        token = request_id.set("job-7")
        log.info("it fails")
        log.info("job-7-0 ends")
        request_id.reset(token)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["INFO    api: nobody's", "INFO    api: [job-7] it fails", "INFO    api: job-7-0 ends"]


def test_the_log_of_a_failure_names_the_request(
    client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.getMessage(), request_id.get()))

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(served.frontend.manager.builder, "tokenize", fail)
    handler = Handler()
    logging.getLogger("vlmserve.api.errors").addHandler(handler)
    try:
        assert client.post(URL, json=BODY, headers={"X-Request-Id": "job-7"}).status_code == 500
    finally:
        logging.getLogger("vlmserve.api.errors").removeHandler(handler)
    assert seen == [("a request failed unexpectedly", "job-7")]
    assert request_id.get() == ""


def test_log_requests(serve, caplog: pytest.LogCaptureFixture) -> None:
    _served, client = serve(log_requests=True)
    try:
        with client:
            reply = client.post(URL, json=BODY, headers={"X-Request-Id": "job-7"})
    finally:
        requests.setLevel(logging.NOTSET)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vlmserve.requests"]
    prompt = reply.json()["usage"]["prompt_tokens"]
    assert re.fullmatch(
        rf"chatcmpl-job-7-[0-9a-f]{{8}}-0 length: {prompt} prompt tokens \({prompt // 2} cached\), 4 tokens; "
        r"queue 0\.250, prefill 1\.000, decode 3\.000, total \d+\.\d{3} s",
        line,
    )
    assert "hi" not in line.replace("chatcmpl", "")
