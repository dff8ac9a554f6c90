"""Responses: what of a request becomes a chat, what of a chat becomes events and items, and what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import MODEL, Served, ids_of, png_url
from vlmserve.api.responses import held
from vlmserve.api.responses.api import ResponseStore
from vlmserve.api.responses.items import to_chat_request, to_conversation, with_ids
from vlmserve.api.responses.protocol import ResponsesRequest
from vlmserve.api.responses.writer import ResponseWriter
from vlmserve.api.stores.opening import Stores
from vlmserve.ipc.messages import FinishReason
from vlmserve_common.errors import BadRequestError

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def _chat(given: Any, **fields: Any) -> Any:
    request = ResponsesRequest.model_validate({"model": "m", "input": given, **fields})
    return to_chat_request(request, to_conversation([], with_ids(request.input), request.instructions))


# ---------------------------------------------------------------- requests


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": "Ask f."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I "}, {"type": "output_text", "text": "ask."}],
        },
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {**CALL, "call_id": "c3"},
    ]

    def called(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert _chat(items, instructions="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Ask f."}]},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "Hm.",
            "tool_calls": [called("c1"), called("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": None, "tool_calls": [called("c3")], "reasoning_content": "So."},
    ]


def test_fields_become_those_of_a_chat() -> None:
    chat = _chat(
        "hi",
        tools=[TOOL, {**TOOL, "name": "g"}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low"},
        max_output_tokens=7,
        top_logprobs=2,
        seed=3,
        parallel_tool_calls=False,
    )
    assert chat.tools == [
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}, "strict": True}}
    ]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert (chat.reasoning_effort, chat.max_completion_tokens, chat.seed) == ("low", 7, 3)
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert _chat("hi", include=["message.output_text.logprobs"]).logprobs is True
    assert _chat("hi", tools=[TOOL], tool_choice={"type": "function", "name": "f"}).tool_choice.function.name == "f"
    assert _chat("hi", text={"format": {"type": "text"}}).response_format is None
    with pytest.raises(BadRequestError, match="not among the tools"):
        _chat(
            "hi",
            tools=[TOOL],
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
        )


# ---------------------------------------------------------------- answers


def _chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _written(*chunks: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    writer = ResponseWriter({"id": "r"})
    events = [*writer.begin()]
    for chunk in chunks:
        events += writer.take(chunk)
    events += writer.end()
    response = writer.response()
    return [*events, writer.last(response)], response


def _calls(index: int, arguments: str, **head: Any) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": head["name"]} if head else {})
    return _chunk(tool_calls=[{"index": index, "function": function} | ({"id": head["id"]} if head else {})])


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    events, response = _written(
        _chunk(role="assistant", content=""),
        _chunk(reasoning_content="Hm"),
        _chunk(reasoning_content="."),
        _chunk(content="I ask."),
        _calls(0, "", id="c1", name="f"),
        _calls(0, '{"x":'),
        _calls(0, "1}"),
        _calls(1, "{}", id="c2", name="g"),
        _chunk("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
    )
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    thoughts, message, first, second = response["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I ask."
    assert (first["call_id"], first["name"], first["arguments"]) == ("c1", "f", '{"x":1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("c2", "g", "{}")
    assert {item["status"] for item in response["output"]} == {response["status"]} == {"completed"}
    assert response["usage"]["total_tokens"] == 7
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    of_items = [event for event in events if "output_index" in event]
    assert [event["output_index"] for event in of_items] == sorted(event["output_index"] for event in of_items)


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    _, response = _written(_chunk(role="assistant", content=""), _chunk("stop"))
    assert [item["content"][0]["text"] for item in response["output"]] == [""]


def test_a_stream_that_breaks_has_failed(client: TestClient, served: Served) -> None:
    def script(request: Any, index: int) -> int:
        if index == 2:
            served.frontend.manager.abort(None)
        return 65

    served.scheduler.script = script
    lines = client.post("/v1/responses", json={"model": MODEL, "input": "hi", "stream": True}).text.splitlines()
    assert lines[-3] == "event: response.failed"
    assert '"status":"failed"' in lines[-2]
    assert "aborted by an operator" in lines[-2]
    served.scheduler.fail_with = FinishReason(type="error", message="no such luck", status=500)
    for stream in (False, True):  # before anything was sent
        answer = client.post("/v1/responses", json={"model": MODEL, "input": "hi", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "no such luck")


def test_a_full_disk_is_told(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []
    add = ResponseStore.add

    def add_to_full(store: ResponseStore, *given: Any) -> None:
        opened.append(store._database._connection)
        opened[-1].execute("PRAGMA max_page_count = 1")  # as small as it is
        add(store, *given)

    monkeypatch.setattr(ResponseStore, "add", add_to_full)
    body = {"model": MODEL, "input": "hi", "metadata": {str(key): "x" * 512 for key in range(16)}}
    answer = client.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
    opened[0].execute("PRAGMA max_page_count = 100000")
    monkeypatch.undo()
    assert client.post("/v1/responses", json=body).status_code == 200


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def store(stores: Stores) -> Iterator[ResponseStore]:
    store = ResponseStore(stores, most=2, most_bytes=1000)
    yield store
    store.close()


def _response(name: str, previous: str | None = None, text: str = "") -> dict[str, Any]:
    return {"id": name, "previous_response_id": previous, "output": [{"text": name + text}]}


def test_the_oldest_go_first(store: ResponseStore) -> None:
    for name in "abc":
        store.add("me", _response(name), [])
    with pytest.raises(BadRequestError):
        store.find("me", "a")
    store.add("me", _response("d", text="x" * 890), [{"text": "in"}])
    with pytest.raises(BadRequestError):
        store.find("me", "c")
    assert store.find("me", "d").input == [{"text": "in"}]
    store.add("me", _response("e", text="x" * 2000), [])  # larger than the store
    with pytest.raises(BadRequestError):
        store.find("me", "e")


@pytest.mark.parametrize(("many", "text"), [(20, ""), (5, "x" * 700), (1, "x" * 2000)])
def test_no_owner_pushes_out_another(store: ResponseStore, many: int, text: str) -> None:
    store.add("you", _response("yours"), [])
    for number in range(many):
        store.add("me", _response(f"mine-{number}", text=text), [])
    assert store.find("you", "yours")
    if len(text) < 1000:
        assert store.find("me", f"mine-{many - 1}")


def test_a_conversation_is_all_that_it_goes_back_to(store: ResponseStore) -> None:
    store.add("me", _response("a"), [{"text": "1"}])
    store.add("me", _response("b", "a"), [{"text": "2"}])
    assert [[item["text"] for item in one.items] for one in store.chain("me", "b")] == [["2", "b"], ["1", "a"]]
    for owner, name in (("you", "b"), ("me", "x")):
        with pytest.raises(BadRequestError) as caught:
            store.chain(owner, name)
        assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    store.delete("me", "a")
    with pytest.raises(BadRequestError, match="which 'b' goes back to"):
        store.chain("me", "b")


def test_it_is_there_after_a_restart(store: ResponseStore, stores: Stores) -> None:
    store.add("me", _response("a"), [])
    store.close()
    with contextlib.closing(ResponseStore(stores, most=5, most_bytes=1000)) as again:
        assert again.find("me", "a").response == _response("a")


# ---------------------------------------------------------------- media of earlier responses

RESPONSES = "/v1/responses"


def _shown(seed: int, **fields: Any) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": png_url((seed, 60, 30))}
    return {"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "And?"}]}], **fields}


def _respond(client: TestClient, **body: Any) -> str:
    answer = client.post(RESPONSES, json={"model": MODEL, "max_output_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def _digests(served: Served) -> list[bytes]:
    return [item.digest for item in served.scheduler.requests[-1].mm_inputs.items]


def _loads(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many media each request loads."""
    pool, found = served.frontend.manager._media._pool, []
    load = pool.load

    async def counted(requests: Any, **options: Any) -> Any:
        found.append(len(requests))
        return await load(requests, **options)

    monkeypatch.setattr(pool, "load", counted)
    return found


def test_pictures_of_earlier_responses_are_not_loaded_again(
    client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine is asked is what it is asked without a memory of them."""
    loads = _loads(served, monkeypatch)
    first = _respond(client, **_shown(1))
    assert served.scheduler.requests[-1].session_id == ""
    second = _respond(client, **_shown(2), previous_response_id=first)
    _respond(client, input="Why?", previous_response_id=second)
    third = served.scheduler.requests[-1]
    assert [sum(loads[at : at + 2]) for at in (0, 2, 4)] == [1, 1, 0]
    assert third.session_id.endswith(f"responses from {first}")
    digests = _digests(served)
    client.app.state.response_media.forget(first)
    _respond(client, input="Why?", previous_response_id=second)
    again = served.scheduler.requests[-1]
    assert sum(loads[6:]) == 1, "what is gone is loaded again"
    assert (ids_of(again), _digests(served)) == (ids_of(third), digests)
    branch = _respond(client, **_shown(3), previous_response_id=first, store=False, stream=False)
    assert len(_digests(served)) == 2
    assert branch.startswith("resp")


def test_a_response_that_had_to_load_them_again_keeps_all(
    client: TestClient, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _respond(client, **_shown(1))
    client.app.state.response_media.forget(first)
    second = _respond(client, **_shown(2), previous_response_id=first)
    loads = _loads(served, monkeypatch)
    _respond(client, **_shown(3), previous_response_id=second)
    assert sum(loads) == 1
    assert len(_digests(served)) == 3


def test_turns_that_are_left_out_take_their_pictures_with_them(client: TestClient, served: Served) -> None:
    first = _respond(client, **_shown(1))
    second = _respond(client, **_shown(2), previous_response_id=first)
    _respond(client, input="word " * 45, previous_response_id=second, truncation="auto")
    assert len(served.scheduler.requests[-1].mm_inputs.items if served.scheduler.requests[-1].mm_inputs else ()) < 2


def test_pictures_that_others_need_to_be_found_are_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response is of no use to one that goes on from it without those in between."""
    monkeypatch.setattr(held, "nbytes_of", lambda _: 1)

    async def found() -> list[Any]:
        media = held.HeldMedia(3, ttl=60.0)
        for number, name in enumerate("abc"):
            media.keep(name, [name], whole=not number)  # type: ignore[list-item]
        assert media.find("cba") == ["a", "b", "c"]
        media.keep("d", ["d"], whole=False)  # type: ignore[list-item]
        return media.find("dcba")

    assert asyncio.run(found()) == ["b", "c", "d"]


def test_memory_of_earlier_pictures_is_bounded(serve: Callable[..., tuple[Served, TestClient]]) -> None:
    _, client = serve(max_response_media_bytes=8000, open_session_timeout_s=0.5)
    with client:
        held = client.app.state.response_media
        names = [_respond(client, **_shown(seed)) for seed in range(3)]
        assert list(held._kept) == names[2:], "4704 bytes each"
        assert client.delete(f"{RESPONSES}/{names[2]}").status_code == 200
        assert (held._kept, held.nbytes) == ({}, 0)
        _respond(client, **_shown(9))
        until = time.monotonic() + 10
        while held.nbytes:
            assert time.monotonic() < until
            time.sleep(0.02)
    _, client = serve(max_response_media_bytes=0)
    with client:
        first = _respond(client, **_shown(1))
        _respond(client, input="Why?", previous_response_id=first)


def test_errors_name_the_places_of_the_request(client: TestClient) -> None:
    first = _respond(client, **_shown(1))
    bad = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    body = {"model": MODEL, "input": [{"role": "user", "content": [bad]}], "previous_response_id": first}
    answer = client.post(RESPONSES, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].content[0]"
