"""The API's description: all routes are in it, all references resolve, and its page works without internet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import MODEL, write_checkpoint_folder
from tests.vlmserve.documented import ask
from vlmserve.api.app import all_operations
from vlmserve.api.auth import CONTROL_PATHS, DESCRIPTION_PATHS
from vlmserve.api.openapi import openapi_document
from vlmserve.ipc.messages import FinishReason

OPERATIONS = all_operations()
DOCUMENT = openapi_document(OPERATIONS, model=MODEL, keys=True, admin_key=True)


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in some JSON."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(one)


def test_all_routes_are_described(client: TestClient) -> None:
    routes = {
        (method, route.path)
        for route in client.app.routes
        if route.path not in DESCRIPTION_PATHS
        for method in getattr(route, "methods", ())  # OpenAPI knows no WebSockets
    }
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}
    assert len(OPERATIONS) == len(routes) == len({operation.id for operation in OPERATIONS})
    assert {operation.path for operation in OPERATIONS if operation.tag == "Operators"} == CONTROL_PATHS
    assert client.get("/openapi.json").json()["paths"].keys() == DOCUMENT["paths"].keys()
    assert all(operation.summary for operation in OPERATIONS)


def test_it_is_a_valid_document() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    components = DOCUMENT["components"]["schemas"]
    references = [part["$ref"] for part in parts(DOCUMENT) if isinstance(part.get("$ref"), str)]
    mapped = [to for part in parts(DOCUMENT) for to in part.get("discriminator", {}).get("mapping", {}).values()]
    assert len(references) > 100
    assert {"#/components/schemas/" + name for name in components} == {*references, *mapped}, "unresolved, or unused"
    assert "$defs" not in json.dumps(DOCUMENT)
    assert not [name for name in components if not re.fullmatch(r"[A-Z][A-Za-z]+", name)], "two types of one name"


def test_answers_and_errors_have_schemas() -> None:
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            for status, response in operation["responses"].items():
                for media, content in response["content"].items():
                    assert content["schema"] or media == "application/octet-stream", (path, method, status)
                if int(status) >= 400 and (path, status) != ("/flush_cache", "409"):
                    assert response["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatCompletionRequest")
    event = chat["responses"]["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
    assert "#/components/schemas/ChatCompletionChunk" in json.dumps(event)


@pytest.mark.parametrize(
    ("settings", "schemes", "of_chats", "of_operators"),
    [
        ({}, set(), [], []),
        ({"api_key": "a"}, {"apiKey"}, [{"apiKey": []}], [{"apiKey": []}]),
        ({"admin_api_key": "b"}, {"adminApiKey"}, [], [{"adminApiKey": []}]),
        (
            {"api_key": "a", "admin_api_key": "b"},
            {"apiKey", "adminApiKey"},
            [{"apiKey": []}],
            [{"adminApiKey": []}],
        ),
    ],
)
def test_keys(serve, settings: Any, schemes: Any, of_chats: Any, of_operators: Any) -> None:
    """The document is there without a key, and says what needs one: it is so."""
    _served, client = serve(**settings)
    with client:
        document = client.get("/openapi.json").json()
        assert document["components"].get("securitySchemes", {}).keys() == schemes
        assert document.get("security", []) == ([{"apiKey": []}] if "api_key" in settings else [])
        assert document["paths"]["/v1/chat/completions"]["post"]["security"] == of_chats
        assert document["paths"]["/flush_cache"]["post"]["security"] == of_operators
        for path, item in document["paths"].items():
            for method, operation in item.items():
                refused = client.request(method, re.sub(r"\{\w+\}", "x", path)).status_code == 401
                assert refused == bool(operation["security"]) == ("401" in operation["responses"]), path


def test_the_page_asks_nobody_else(serve) -> None:
    """Nor for a key."""
    _served, client = serve(api_key="a")
    with client:
        page = client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"(?:https?:)?//[\w.]", page.text), "a file from elsewhere"
        named = re.findall(r"""(?:src|href|url)(?:=|: )["']([^"']+)["']""", page.text)
        assert set(named) == {"docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "openapi.json", "data:,"}
        assert "'validatorUrl': null" in page.text.replace('"', "'")
        for name, kind, least in (
            ("docs/swagger-ui-bundle.js", "javascript", 1_000_000),
            ("docs/swagger-ui.css", "text/css", 100_000),
        ):
            file = client.get("/" + name)
            assert (file.status_code, kind in file.headers["content-type"]) == (200, True)
            assert len(file.content) > least
        style = client.get("/docs/swagger-ui.css").text
        assert not re.search(r"@import|url\((?!['\"]?(?:data:|#))", style)


# ---------------------------------------------------------------- answers, whole and streamed

SAID = 'I look.\n</think>\n\nYes.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE_BODY = {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "top_logprobs": 1}
by_operation = pytest.mark.parametrize(
    ("name", "body"), [("createChatCompletion", CHAT_BODY), ("createResponse", RESPONSE_BODY)]
)


@by_operation
def test_thoughts_and_calls_are_as_documented(serve, tmp_path: Path, name: str, body: dict[str, Any]) -> None:
    folder = write_checkpoint_folder(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "<think>\n")
    served, client = serve(folder=folder)
    served.scheduler.say(SAID)
    with client:
        whole = ask(client, name, json={"model": MODEL, **body})
        events = ask(client, name, json={"model": MODEL, **body, "stream": True})
    if name == "createResponse":
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
        said = whole["output"][1]["content"][0]
        assert said["text"] in "".join(token["token"] for token in said["logprobs"])
        assert {"response.reasoning_text.done", "response.function_call_arguments.done"} < {e["type"] for e in events}
        return
    [choice] = whole["choices"]
    assert choice["message"].keys() >= {"reasoning_content", "tool_calls"}
    assert choice["finish_reason"] == "tool_calls"
    deltas = [choice["delta"].keys() for event in events for choice in event["choices"]]
    assert {"role", "content", "reasoning_content", "tool_calls"} == set().union(*deltas)


@by_operation
def test_what_an_engine_that_fails_says_is_as_documented(serve, name: str, body: dict[str, Any]) -> None:
    served, client = serve()
    served.scheduler.fail_with = FinishReason(type="error", message="out of memory", status=500)
    with client:
        assert ask(client, name, json={"model": MODEL, **body})["error"]["type"] == "server_error"
        served.frontend.fail_all("the scheduler died")
        assert ask(client, "getHealth")["error"]["code"] == "engine_unavailable"
