"""What answers mean, of vlmserve and of others; and who is asked next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmserve.commands.caption.servers import (
    Away,
    NoAnswer,
    ServerStanding,
    Unfit,
    choose,
    judge_answer,
    judge_models,
)
from vlmserve_common.errors import BadRequestError


def judged(status: int, body: Any, *, wanted: int = 1, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return judge_answer(status, named, content, wanted=wanted)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a dog", "a dog"),
        (None, ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "dog"}, {"type": "audio"}], "a dog"),
    ],
)
def test_text_in_all_its_forms(content, text):
    """llama.cpp and others leave out what OpenAI's schema asks for."""
    outcome = judged(200, {"choices": [{"message": {"content": content, "refusal": None}}]})
    choice = {"index": 0, "message": {"content": text, "refusal": None}, "finish_reason": None}
    assert outcome == {"choices": [choice], "usage": {}}


def test_too_few_answers_are_a_warning():
    body = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "warnings": ["clamped"], "usage": None}
    content = judged(200, body, wanted=3)
    assert content["warnings"] == ["clamped", "the server gave 1 of 3 answers that were asked for (n)"]
    assert judged(200, body)["warnings"] == ["clamped"]


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (400, {"error": {"message": "m", "param": "p", "code": "c"}}, ("m", "p", "c")),
        (400, {"object": "error", "message": "m", "type": "BadRequest", "code": 400}, ("m", None, "BadRequest")),
        (422, {"detail": [{"loc": ["body"]}]}, ('[{"loc": ["body"]}]', None, None)),
        (400, {"error": "m"}, ("m", None, None)),
        (413, b"<html>413 too large</html>", ("HTTP 413: <html>413 too large</html>", None, None)),
        (404, {"error": {"message": "m", "param": "messages[0]"}}, ("m", "messages[0]", None)),
        (415, {"error": {"message": "m"}}, ("m", None, None)),
    ],
)  # fmt: skip
def test_the_requests_own_fault(status, body, told):
    outcome = judged(status, body)
    assert isinstance(outcome, BadRequestError)
    assert (outcome.message, outcome.param, outcome.code, outcome.status) == (*told, status)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {}, Unfit),
        (403, b"", Unfit),
        (404, {"error": {"message": "no such model", "param": "model"}}, Unfit),
        (404, b"<html>", NoAnswer),
        (408, {"error": {"message": "m"}}, NoAnswer),
        (405, b"", NoAnswer),
        (301, b"", NoAnswer),
        (500, {"error": {"message": "m"}}, NoAnswer),
        (503, b"", Away),
        (402, b"", Away),
        (200, b"[" * 100_000, NoAnswer),
        (200, b"<html>Bad gateway</html>", NoAnswer),
        (200, {"choices": []}, NoAnswer),
        (200, {"error": {"message": "upstream is gone"}}, NoAnswer),
        (200, {"choices": [{"message": {"content": "half"}, "finish_reason": "abort"}]}, NoAnswer),
        (200, b'{"choices": {"a": 1}}', NoAnswer),
        (200, b'{"choices": [null]}', NoAnswer),
        (200, b'{"choices": [{"message": {"content": [1]}}]}', NoAnswer),
    ],
)
def test_what_is_not_the_requests_fault(status, body, kind):
    assert type(judged(status, body)) is kind


def test_when_to_ask_again():
    assert judged(429, b"", retry_after="12").retry_after_s == 12
    assert judged(503, b"", retry_after="Wed, 01 Jan 2200 00:00:00 GMT").retry_after_s > 1e9
    for nonsense in ("-1", "soon", "1e999", "nan", "²", "Wed, 01 Jan 2020 00:00:00 GMT"):
        assert judged(429, b"", retry_after=nonsense).retry_after_s == 0


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"[]", b'{"data": []}', b'{"data": [{}]}', b'{"data": ["m"]}', b'{"data": null}']
)
def test_a_list_of_models_that_is_none(content):
    assert isinstance(judge_models(200, {}, content), Away)


def test_a_slow_server_gets_fewer_and_an_idle_one_some():
    fast, slow = ServerStanding("http://fast"), ServerStanding("http://slow")
    for server, seconds in ((fast, 1.0), (slow, 4.0)):
        server.release(server.take())
        server.answered(0, seconds)
    taken = []
    for _ in range(10):
        server = choose([fast, slow], [])
        assert server is not None
        server.take()
        taken.append(server)
    assert (taken.count(fast), taken.count(slow)) == (8, 2)
    assert choose([fast, slow], [slow]) is fast
    assert choose([slow], [slow]) is slow


def test_pauses_grow_and_begin_anew_after_an_answer():
    server = ServerStanding("http://a")
    pauses = []
    for number in range(9):
        pauses.append(server.leave_out("dead"))
        server.is_in = True
        assert server.failed(server.era, number)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    server.answered(server.era - 1, 1.0)  # says nothing about how it is now
    assert server.leave_out("dead") == 30
    server.is_in = True
    server.answered(server.era, 1.0)
    assert server.leave_out("dead") == 0.5


def test_one_request_that_always_fails_makes_the_pauses_no_longer():
    server = ServerStanding("http://a")
    server.leave_out("dead")
    server.is_in = True
    assert server.failed(server.era, 1)
    assert server.leave_out("poison") == 1
    for _ in range(5):
        server.is_in = True
        assert server.failed(server.era, 1)
        assert server.leave_out("poison") == 1


def test_a_server_that_answers_now_and_then_is_not_left_out():
    server = ServerStanding("http://a")
    for number in range(0, 20, 2):
        assert not server.failed(0, number)
        assert not server.failed(0, number + 1)
        server.answered(0, 1.0)
    assert not server.failed(0, 20)
    assert not server.failed(0, 21)
    assert server.failed(0, 22)
