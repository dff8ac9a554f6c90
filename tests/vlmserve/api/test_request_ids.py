"""The id of a request: in headers, answers, the engine's names and the log, which has a line for every request."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import BODY, CHAT, Served
from vlmserve.api.http_server import OnceInAWhile
from vlmserve.api.outermost import access, requests
from vlmserve_common.logs import configure_logging, request_id


def test_the_clients_own_is_kept_and_the_engines_are_different(client: TestClient, served: Served) -> None:
    replies = [client.post(CHAT, json=BODY, headers={"x-request-id": "job-7.a"}) for _ in range(2)]
    assert [reply.headers["X-Request-Id"] for reply in replies] == ["job-7.a"] * 2
    rids = [request.rid for request in served.scheduler.requests]
    assert len(set(rids)) == 2
    assert all(re.fullmatch(r"chatcmpl-job-7\.a-[0-9a-f]{8}-0", rid) for rid in rids)
    assert [reply.json()["id"] + "-0" for reply in replies] == rids


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 429, 500, 503])
def test_errors_have_it_too(serve, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    full = {"max_running_requests": 1, "max_queued_requests": 1}
    served, client = serve(full, api_key="key", max_body_mib=0.001)
    manager = served.frontend.manager
    if status == 500:
        monkeypatch.delattr(manager.builder, "limits")
    if status == 503:
        manager.fail("it is gone")
    body = {400: {"temperature": 9}, 404: {"model": "other"}, 413: {"stop": "x" * 2000}, 429: {"n": 128}}.get(status)
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer wrong" if status == 401 else "Bearer key"}
    with client:
        method = "DELETE" if status == 405 else "POST"
        reply = client.request(method, CHAT, json={**BODY, **(body or {})}, headers=headers)
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
    log = logging.getLogger("vlmserve.api.errors")
    monkeypatch.setattr(log, "handle", lambda record: seen.append((record.getMessage(), request_id.get())))
    monkeypatch.setattr(served.frontend.manager.builder, "tokenize", lambda *_, **__: 1 // 0)
    assert client.post(CHAT, json=BODY, headers={"X-Request-Id": "job-7"}).status_code == 500
    assert seen == [("a request failed unexpectedly", "job-7")]
    assert request_id.get() == ""


def test_log_requests(serve, caplog: pytest.LogCaptureFixture) -> None:
    _served, client = serve(log_requests=True)
    try:
        with client:
            reply = client.post(CHAT, json=BODY, headers={"X-Request-Id": "job-7"})
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


@pytest.fixture
def logging_client(serve) -> Iterator[TestClient]:
    """As with --log-level error: the lines come all the same."""
    root = logging.getLogger()
    before = root.level
    _served, client = serve(access_log=True, api_key="secret")
    client.headers["Authorization"] = "Bearer secret"
    root.setLevel(logging.ERROR)
    with client:
        yield client
    access.setLevel(logging.NOTSET)
    root.setLevel(before)


def test_every_request_is_a_line(logging_client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    replies = [
        logging_client.post(CHAT, json=BODY),
        logging_client.post(CHAT, json={**BODY, "stream": True}),
        logging_client.post(CHAT, json={**BODY, "temperature": 9}),
        logging_client.post(CHAT, json=BODY, headers={"Authorization": "Bearer other"}),
        logging_client.get("/v1/models?api_key=secret"),
        logging_client.get("/no%0Awhere%20else"),
    ]
    lines = [record.getMessage() for record in caplog.records if record.name == "vlmserve.access"]
    ids = [reply.headers["X-Request-Id"] for reply in replies]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"testclient:\d+ (GET|POST) \S+ \d+ \d+\.\d{3} s \S+", line) for line in lines)
    assert [re.sub(r"\S+ (.*) \S+ s (\S+)", r"\1 \2", line) for line in lines] == [
        f"POST {CHAT} 200 {ids[0]}",
        f"POST {CHAT} 200 {ids[1]}",
        f"POST {CHAT} 400 {ids[2]}",
        f"POST {CHAT} 401 {ids[3]}",
        f"GET /v1/models 200 {ids[4]}",
        f"GET /no%0Awhere%20else 404 {ids[5]}",
    ]
    assert ids[0] == replies[0].json()["id"]


def test_nothing_is_logged_unasked(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert client.get("/v1/models").headers["X-Request-Id"].startswith("req-")
    assert [record for record in caplog.records if record.name == "vlmserve.access"] == []


def test_a_line_comes_once_and_the_next_one_counts() -> None:
    now, seen = 0.0, []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    log = logging.Logger("log")
    log.addHandler(handler)
    log.addFilter(OnceInAWhile(10, clock=lambda: now))
    for second in range(25):
        now = second
        for number in range(3):
            log.warning("socket.accept() failed\nsocket: %d", number)
        log.warning("other %d", second)
    assert [line.partition("\n")[0] for line in seen if "accept" in line] == ["socket.accept() failed"] * 3
    assert [line.rpartition(" (")[2] for line in seen if "accept" in line][1:] == [
        "29 more such lines were left out)"
    ] * 2
    assert [line.partition(" (")[0] for line in seen if "other" in line] == ["other 0", "other 10", "other 20"]
