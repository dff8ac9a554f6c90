"""Captions by servers that die, talk nonsense, are busy, and come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.vlmserve.commands.caption.stub_server import (
    FastTime,
    Held,
    Reply,
    StubServer,
    ToldTime,
    always,
    ask,
    captioner,
    echo,
    in_loop,
    text_of,
)
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve_common.errors import BadRequestError, EngineError

# ---- servers that fail


@in_loop
async def test_a_dead_servers_requests_go_to_others_until_it_is_back():
    time, held = ToldTime(), Held()
    async with StubServer(held) as dying, StubServer() as other:
        async with captioner(dying, other, time=time) as asked:
            asking = asyncio.ensure_future(ask(asked, "a"))
            await held.at_work.wait()
            await dying.die()  # while it answers
            assert await asking == "says a"
            assert len(other.asked) == 1
            assert [await ask(asked, str(n)) for n in range(4)] == [f"says {n}" for n in range(4)]
            assert len(other.asked) == 5
            await time.passes(0.5)  # it is looked for, in vain
            await time.passes(1.0)
            await dying.start()
            held.release.set()
            await time.passes(2.0)
            while not asked._servers[0].is_in:
                await asked._changed.wait()
            assert await asyncio.gather(*(ask(asked, str(n)) for n in range(4))) == [f"says {n}" for n in range(4)]
            assert len(dying.asked) > 1
        (note,) = asked.notes()
        told = "was left out 1 time (last: connection refused); 2 requests sent there went out again"
        assert note == f"{dying.url}/v1 {told}"


NONSENSE = [
    (Reply(body=b""), "not a JSON object: nothing"),
    (Reply(body={"choices": [{"message": {"content": "half"}, "finish_reason": "abort"}]}), "broken off"),
    (Reply(status=502, body=b"<html>nginx</html>"), "HTTP 502: <html>nginx</html>"),
    (Reply(body={"choices": []}, cut=4), "peer closed connection"),
    (Reply(body=b"zipped?", headers={"Content-Encoding": "gzip"}), "incorrect header check"),
]


@pytest.mark.parametrize(("reply", "told"), NONSENSE)
@in_loop
async def test_nonsense_fails_one_request_and_leaves_out_a_server_that_says_nothing_else(reply, told):
    async def answer(body: dict[str, Any]) -> Reply:
        return reply if text_of(body) == "poison" else await echo(body)

    time = ToldTime()
    async with (
        StubServer(answer) as one,
        StubServer(answer) as other,
        captioner(one, other, time=time) as asked,
    ):
        asking = asyncio.ensure_future(ask(asked, "poison"))
        await time.passes(1.0)  # before it is tried again where it failed
        with pytest.raises(EngineError, match=r"^no answer in 3 tries; ") as error:
            await asking
        assert len(one.asked) + len(other.asked) == 3
        assert await ask(asked, "a") == "says a"
        assert asked.notes() == [], "no server was left out"
    message = str(error.value)
    assert (message.count(told), one.url in message, other.url in message) == (2, True, True)

    async with StubServer(always(reply)) as bad, StubServer() as good:
        async with captioner(bad, good) as asked:
            answers = [await ask(asked, str(n)) for n in range(20)]
            assert answers == [f"says {n}" for n in range(20)]
            assert len(bad.asked) == 3
            bad.handle = echo
        (note,) = asked.notes()
        assert "was left out 1 time" in note
        assert told in note


@in_loop
async def test_a_request_that_takes_too_long_is_tried_elsewhere():
    async with (
        StubServer(Held()) as slow,
        StubServer() as good,
        captioner(slow, good, request_timeout_s=0.1) as asked,
    ):
        assert await ask(asked, "a") == "says a"
        await slow.hung_up.wait()
        assert len(slow.asked) == 1
        assert asked._servers[0]._failed == {0}


@in_loop
async def test_neither_bad_nor_cancelled_requests_leave_a_server_out():
    held, refuse = Held(), always(Reply(status=422, body={"error": {"message": "no picture"}}))
    async with StubServer(refuse) as server, captioner(server) as asked:
        for _ in range(5):
            with pytest.raises(BadRequestError, match="no picture"):
                await ask(asked)
        server.handle = held
        asking = asyncio.ensure_future(ask(asked))
        await held.at_work.wait()
        asking.cancel()
        await server.hung_up.wait()
        assert (len(server.asked), asked.notes()) == (6, [])


@in_loop
async def test_a_server_on_trial_gets_one_request_at_a_time():
    time, release = ToldTime(), asyncio.Event()
    most = under_way = 0

    async def count(body: dict[str, Any]) -> Reply:
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        await release.wait()
        under_way -= 1
        return await echo(body)

    async with StubServer(count) as server, captioner(server, time=time) as asked:
        await server.die()
        asking = [asyncio.ensure_future(ask(asked, str(n))) for n in range(8)]
        await time.passes(0.5)
        await server.start()
        await time.passes(1.0)
        while not server.asked:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert most == 1
        release.set()
        assert await asyncio.gather(*asking) == [f"says {n}" for n in range(8)]
        assert len(server.asked) == 8


@in_loop
async def test_refusals_from_before_it_was_left_out_say_nothing_about_it():
    time = ToldTime()
    refusals: dict[str, asyncio.Event] = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def refuse(body: dict[str, Any]) -> Reply:
        event = refusals.pop(text_of(body), None)
        if event is None:
            return await echo(body)
        await event.wait()
        return Reply(status=503, body=b"no")

    async with StubServer(refuse) as server, captioner(server, time=time) as asked:
        early, late = refusals["a"], refusals["b"]
        first, second = asyncio.ensure_future(ask(asked, "a")), asyncio.ensure_future(ask(asked, "b"))
        while refusals:
            await asyncio.sleep(0)
        early.set()
        await time.passes(0.5)
        assert await first == "says a"
        late.set()
        assert await second == "says b"
        assert asked._servers[0].times_left_out == 1


@in_loop
async def test_a_refusal_in_the_middle_of_the_run_is_one_requests():
    """403 may come from a filter in front of the server, 404 from one that starts anew."""

    async def refuse(body: dict[str, Any]) -> Reply:
        return Reply(status=403, body=b"<html>blocked") if text_of(body) == "odd" else await echo(body)

    async with StubServer(refuse) as server, captioner(server, time=FastTime()) as asked:
        assert await ask(asked, "a") == "says a"
        with pytest.raises(EngineError, match=r"no answer in 3 tries; .*HTTP 403: <html>blocked"):
            await ask(asked, "odd")
        assert await ask(asked, "b") == "says b"
        assert asked.notes() == []


# ---- servers that are busy


@pytest.mark.parametrize("status", [429, 503, 402])
@in_loop
async def test_to_be_sent_away_uses_up_no_tries_and_takes_as_long_as_the_server_says(status):
    time, waits = ToldTime(), [7, 7, 7, 7, 7, 40]

    async def busy(body: dict[str, Any]) -> Reply:
        if waits:
            headers = {"Retry-After": str(waits.pop(0))}
            return Reply(status=status, body={"error": {"message": "busy"}}, headers=headers)
        return await echo(body)

    async with StubServer(busy) as server, captioner(server, time=time, server_timeout_s=1e6) as asked:
        asking = asyncio.ensure_future(ask(asked, "a"))
        for seconds in (7, 7, 7, 7, 8, 40):
            await time.passes(seconds)
        assert await asking == "says a"
        assert [seconds for seconds in time.slept if seconds < 1e6] == [7, 7, 7, 7, 8, 40]
    (note,) = asked.notes()
    assert f"HTTP {status}: busy" in note
    assert "6 times" in note
    looks = sum(request.startswith("GET") for request in server.requests)
    assert looks == (1 if status == 429 else 7)


@in_loop
async def test_a_busy_server_gets_fewer_at_a_time():
    time, room, most = FastTime(), 4, 0
    refused = under_way = 0

    async def small(body: dict[str, Any]) -> Reply:
        nonlocal refused, under_way, most
        if under_way == room:
            refused += 1
            return Reply(status=429, body={"error": {"message": "full"}})
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return await echo(body)

    async with StubServer(small) as server, captioner(server, time=time, server_timeout_s=1e6) as asked:
        answers = await asyncio.gather(*(ask(asked, str(n)) for n in range(100)))
        assert answers == [f"says {n}" for n in range(100)]
        assert most == room
        assert refused < 300  # the first rush, half of it, ... and then now and then one too many


# ---- the end


@in_loop
async def test_when_all_are_gone_the_run_ends_with_everyones_reason():
    time = ToldTime()
    async with (
        StubServer() as one,
        StubServer() as other,
        captioner(one, other, time=time, server_timeout_s=20.0) as asked,
    ):
        assert await ask(asked, "a") == "says a"
        await one.die()
        await other.die()
        asking = asyncio.gather(*(ask(asked) for _ in range(5)), return_exceptions=True)
        await time.passes_until(asking)
        told = "no server answers (waited 20 s, --server-timeout-s): "
        told += f"{one.url}/v1: connection refused; {other.url}/v1: connection refused"
        assert [str(error) for error in await asking] == [told] * 5
        assert time.slept.count(20.0) == 1
        with pytest.raises(CaptionStopped, match="no server answers"):
            await ask(asked)


@in_loop
async def test_a_server_that_lives_but_never_answers_is_not_waited_for_for_ever():
    """Its list of models comes back again and again."""
    fail = always(Reply(status=503, body={"error": {"message": "the engine is gone"}}))
    async with StubServer(fail) as server, captioner(server, time=FastTime(), server_timeout_s=40.0) as asked:
        with pytest.raises(CaptionStopped, match="HTTP 503: the engine is gone"):
            await ask(asked)


@in_loop
async def test_a_server_that_is_back_at_work_is_waited_for():
    time, held = ToldTime(), Held()
    async with StubServer(held) as server, captioner(server, time=time, server_timeout_s=20.0) as asked:
        await server.die()
        asking = asyncio.ensure_future(ask(asked, "a"))
        await time.passes(0.5)
        await server.start()
        await time.passes(1.0)
        await held.at_work.wait()
        await time.passes(20.0)
        held.release.set()
        assert await asking == "says a"
        await server.die()
        asking = asyncio.ensure_future(ask(asked, "b"))
        await time.passes(0.5)
        await server.start()
        await time.passes(1.0)
        assert await asking == "says b"
        await asyncio.sleep(0)
        assert time.is_awake()  # nobody waits for the end any more


@in_loop
async def test_a_refused_key_ends_the_run():
    async with StubServer() as server, captioner(server) as asked:
        assert await ask(asked, "a") == "says a"
        server.handle = always(Reply(status=401, body={"error": {"message": "expired"}}))
        told = r"no server can be used: .*it refuses the API key, HTTP 401: expired; set --api-key"
        with pytest.raises(CaptionStopped, match=told):
            await ask(asked)


# ---- everything at once


@pytest.mark.parametrize("seed", range(4))
@in_loop
async def test_every_request_is_answered_once_or_fails_for_a_stated_reason(seed):
    dice = random.Random(seed)
    troubles = [reply for reply, _ in NONSENSE]
    away = [Reply(status=429, body=b"", headers={"Retry-After": "1"}), Reply(status=503, body=b"no")]
    given: list[str] = []

    async def trouble(body: dict[str, Any]) -> Reply:
        text = text_of(body)
        await asyncio.sleep(dice.random() / 500)
        if text.startswith("bad"):
            return Reply(status=400, body={"error": {"message": f"{text} is bad"}})
        if text.startswith("poison") or dice.random() < 0.1:
            return dice.choice(troubles)
        if dice.random() < 0.1:
            return dice.choice(away)
        given.append(text)
        return await echo(body)

    async def come_and_go(servers: Sequence[StubServer]) -> None:
        while True:
            server = dice.choice(servers)
            await server.die()
            await asyncio.sleep(dice.random() / 200)
            await server.start()
            await asyncio.sleep(dice.random() / 50)

    kinds = ["good"] * 8 + ["bad", "poison"]
    texts = [f"{dice.choice(kinds)} {n}" for n in range(150)]
    async with (
        StubServer(trouble) as a,
        StubServer(trouble) as b,
        StubServer(trouble) as c,
        captioner(a, b, c, time=FastTime(), server_timeout_s=1e6) as asked,
    ):
        room = asyncio.Semaphore(16)

        async def one(text: str) -> str:
            async with room:
                return await ask(asked, text)

        trouble_maker = asyncio.ensure_future(come_and_go([a, b, c]))
        results = await asyncio.gather(*map(one, texts), return_exceptions=True)
        trouble_maker.cancel()
        await asyncio.gather(trouble_maker, return_exceptions=True)
    for text, result in zip(texts, results, strict=True):
        if text.startswith("bad") and isinstance(result, BadRequestError):
            assert str(result) == f"{text} is bad"
        elif isinstance(result, EngineError):
            assert str(result).startswith("no answer in 3 tries; http://127.0.0.1:")
        else:
            assert text.startswith("good")
            assert result == f"says {text}"
            assert text in given
    answered = sum(isinstance(result, str) for result in results)
    assert answered > 0.7 * sum(text.startswith("good") for text in texts)
