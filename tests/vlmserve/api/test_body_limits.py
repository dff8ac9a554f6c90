"""What bodies may hold together, how slowly they may come, and how much may be in them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import BODY, CHAT, MODEL, WAIT_S, Served, real_server, serving
from vlmserve.api import body as body_module
from vlmserve.api.app import all_operations
from vlmserve.api.body import FREE_BYTES
from vlmserve.frontend.openai.protocol import ChatCompletionRequest

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PART = {"type": "text", "text": ""}


@pytest.fixture
def strict(checkpoint_folder: Path) -> Iterator[Served]:
    counts = {"max_json_values": 200, "max_items_per_request": 3, "max_parts_per_request": 4}
    with serving(checkpoint_folder, **counts, max_body_mib=0.5, max_bodies_mib=0.5, body_timeout_s=0.3) as served:
        yield served
        assert served.app.state.bodies.held == 0


def refusal(served: Served, body: object) -> tuple[int, str]:
    client = TestClient(served.app, raise_server_exceptions=False)
    reply = client.post(CHAT, json=body)
    error = reply.json().get("error", {})
    return reply.status_code, f"{error.get('code')}: {error.get('message')}"


def test_messages_and_parts_are_counted_before_they_are_checked(strict: Served) -> None:
    message = {"role": "user", "content": [PART, PART]}
    assert refusal(strict, BODY | {"messages": [message, message]})[0] == 200
    for messages, told in (
        ([message] * 3, "6 parts in the items of messages, the limit is 4 (setting --max-parts-per-request)"),
        ([{"wrong": 1}] * 4, "4 items in messages, the limit is 3 (setting --max-items-per-request)"),
    ):
        assert refusal(strict, BODY | {"messages": messages}) == (400, f"too_many_parts: the request has {told}")


CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 5


@pytest.mark.parametrize(
    ("url", "field", "fields"),
    [
        (CHAT, "tools", BODY | {"tools": [{"wrong": 1}] * 4}),
        (CHAT, "messages", {"messages": [{"role": "assistant", "tool_calls": CALLS}]}),
        ("/v1/warmup", "messages", {"messages": [{"role": "user", "content": [PART] * 5}]}),
        ("/v1/completions", "prompt", {"prompt": ["hi"] * 4}),
        ("/v1/completions", "prompt", {"prompt": [[1, 2]] * 4}),
        ("/v1/score", "items", {"query": "hi", "items": ["a"] * 4, "label_token_ids": [5]}),
        ("/v1/score", "labels", {"query": "hi", "labels": ["a"] * 4}),
        ("/v1/score", "query", {"query": [{"role": "user", "content": [PART] * 5}], "label_token_ids": [5]}),
        ("/v1/responses", "input", {"input": [{"role": "user", "content": "hi"}] * 4}),
        ("/v1/responses", "input", {"input": [{"role": "user", "content": [PART] * 5}]}),
        ("/v1/responses", "input", {"input": [{"type": "function_call_output", "output": [PART] * 5}]}),
        ("/tokenize", "messages", {"messages": [{"role": "user", "content": [PART] * 5}]}),
    ],
)
def test_on_all_routes(strict: Served, url: str, field: str, fields: dict[str, Any]) -> None:
    client = TestClient(strict.app, raise_server_exceptions=False)
    reply = client.post(url, json={"model": MODEL, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "too_many_parts", field)


def test_within_batches(strict: Served) -> None:
    url = "/v1/completions"
    line = {"custom_id": "1", "method": "POST", "url": url, "body": {"model": MODEL, "prompt": ["hi"] * 4}}
    with TestClient(strict.app) as client:
        upload = {"files": {"file": ("in.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        asked = {"input_file_id": client.post("/v1/files", **upload).json()["id"], "endpoint": url}
        batch = client.post("/v1/batches", json=asked | {"completion_window": "24h"}).json()
        while batch["error_file_id"] is None:
            batch = client.get(f"/v1/batches/{batch['id']}").json()
        told = client.get(f"/v1/files/{batch['error_file_id']}/content").json()
    assert told["response"]["body"]["error"]["code"] == "too_many_parts"


def test_token_ids_are_no_items(strict: Served) -> None:
    client = TestClient(strict.app)
    ids = {"model": MODEL, "prompt": list(range(5, 25)), "max_tokens": 1}
    assert client.post("/v1/completions", json=ids).status_code == 200


def test_responses_that_go_on_have_the_items_of_those_before(strict: Served) -> None:
    client = TestClient(strict.app, raise_server_exceptions=False)
    asked = {"model": MODEL, "input": [{"role": "user", "content": "hi"}] * 2, "max_output_tokens": 1}
    first = client.post("/v1/responses", json=asked).json()
    reply = client.post("/v1/responses", json=asked | {"previous_response_id": first["id"]})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "too_many_parts", "input")


def test_values_are_counted_before_the_body_is_read(strict: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(strict, BODY | {"metadata": {str(i): "" for i in range(30)}})[0] == 200
    monkeypatch.setattr("pydantic_core.from_json", None)  # it is not called
    assert refusal(strict, BODY | {"unknown": [0] * 200}) == (
        400,
        "too_many_values: the request body has more commas, opening brackets and quotation marks than 200 (setting "
        "--max-json-values)",
    )
    assert refusal(strict, BODY | {str(number): 0 for number in range(70)})[1].startswith("too_many_values: ")


def test_quotation_marks_in_texts_do_not_count(strict: Served) -> None:
    assert refusal(strict, BODY | {"user": '"' * 1000})[0] == 200


def test_a_body_takes_room_until_its_answer_has_ended(strict: Served) -> None:
    """Its texts and media are parts of it, for as long as the request is there."""
    strict.scheduler.pause_after = 1
    body = json.dumps(BODY | {"user": "x" * 400_000, "stream": True}).encode()
    with real_server(strict.app) as port, sent(port, body) as one, sent(port, body) as other:
        assert {link.recv(65536)[:13] for link in (one, other)} == {b"HTTP/1.1 200 ", b"HTTP/1.1 503 "}
        assert strict.app.state.bodies.held == len(body) - FREE_BYTES


def test_one_large_body_is_parsed_at_a_time(strict: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing holds the interpreter: several threads of it would take turns among themselves, and leave few to all
    else."""
    parse, names = body_module._parse, []

    def watched(data: bytearray, *args: Any) -> Any:
        names.append(threading.current_thread().name)
        return parse(data, *args)

    monkeypatch.setattr(body_module, "_parse", watched)
    for size in (10, 400_000, 400_000):
        assert refusal(strict, BODY | {"user": "x" * size})[0] == 200
    assert names[1:] == ["bodies_0"] * 2
    assert names[0] not in names[1:]


def sent(port: int, body: bytes, length: int | None = None) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (length or len(body)) + body)
    return link


def test_a_body_beyond_the_budget_is_told_to_come_again(strict: Served) -> None:
    """Another one holds it, and is not finished; small requests are answered meanwhile."""
    with real_server(strict.app) as port:
        links = [sent(port, b" " * 400_000, 500_000) for _ in range(2)]
        client = sent(port, json.dumps(BODY).encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        answers = sorted(link.recv(65536) for link in links)
        assert answers[0].startswith(b"HTTP/1.1 408 ")  # the one that held it, in the end
        assert answers[1].startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answers[1]
        assert b"bytes together, the limit is 524288 (setting --max-bodies-mib)" in answers[1]
        for link in (*links, client):
            link.close()


def test_a_body_that_comes_too_slowly(strict: Served) -> None:
    """It never stalls: there is a byte every moment."""
    with real_server(strict.app) as port, sent(port, b"", 100_000) as link:
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


MANY = 1000
BODIES = [
    one.request for one in all_operations() if isinstance(one.request, type) and issubclass(one.request, BaseModel)
]
UNKNOWN = {f"k{number}": 0 for number in range(MANY)}
MEDIUM = {"type": "image_url", "image_url": {"url": "x"}}


def problems_of(model: type[BaseModel], fields: dict[str, Any]) -> int:
    """How many problems pydantic describes: it holds the interpreter for 3 to 15 us for each, and a body has room for
    half a million."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    return caught.value.error_count()


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_unknown_fields_are_not_all_described(model: type[BaseModel]) -> None:
    assert problems_of(model, UNKNOWN) < 10
    for name in model.model_fields:
        for wrong in ([{}] * MANY, [[None] * MANY] * 2, dict.fromkeys(UNKNOWN), [{"type": "wrong", **UNKNOWN}]):
            assert problems_of(model, {name: wrong, "unknown": 1}) < 10


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (UNKNOWN, "k0"),
        ({"messages": [{"role": "x"}] * MANY}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "hi", **UNKNOWN}]}, "messages[0].k0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * MANY}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": [MEDIUM | UNKNOWN]}]}, "messages[0].content[0].k0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}] * MANY}]}, "messages[0].tool_calls[0].id"),
        ({"tools": [{"type": "function", "function": {"name": "f", **UNKNOWN}}]}, "tools[0].function.k0"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, **UNKNOWN}}},
            "response_format.json_schema.k0",
        ),
        ({"stop": ["a", *[1] * MANY]}, "stop[1]"),
        ({"stop_token_ids": [5, *["a"] * MANY]}, "stop_token_ids[1]"),
        ({"logit_bias": {"5": 1, "6": 0.5, **dict.fromkeys(UNKNOWN, True)}}, "logit_bias.k0"),
        ({"metadata": {"a": "b", **UNKNOWN}}, "metadata.k0"),
    ],
)
def test_the_first_problem_is_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    asked = BODY | fields
    assert problems_of(ChatCompletionRequest, asked) <= 3
    reply = client.post(CHAT, json=asked)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_names_of_fields_may_be_megabytes(client: TestClient) -> None:
    error = client.post(CHAT, json=BODY | {"k" * 10**6: 1}).json()["error"]
    assert error["param"] == "k" * 80 + "..."
    assert len(error["message"]) < 200
    error = client.post(CHAT, json=BODY | {"model": "m" * 10**6}).json()["error"]
    assert len(error["message"]) < 200


def test_a_query_is_not_copied_for_thousands_of_items(strict: Served) -> None:
    """A body of 64 MB would become hundreds of gigabytes."""
    client = TestClient(strict.app, raise_server_exceptions=False)
    asked = {"model": MODEL, "query": "q" * 200_000, "items": ["a"] * 3, "label_token_ids": [5]}
    error = client.post("/v1/score", json=asked).json()["error"]
    assert error["param"] == "items"
    assert "a query of 200000 with 3 items makes 600000 characters or ids; the limit is 524288" in error["message"]
