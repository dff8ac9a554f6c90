"""Batches over fake endpoints: what becomes of each line, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import io
import threading
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.batch_house import URL, House, all_over, echo, line, run_all
from tests.vlmserve.api.fake_engine import MODEL, WAIT_S, Served
from vlmserve.api.batches import runner as runner_module
from vlmserve.api.batches.journal import Batch, count_lines, read_lines, write_file
from vlmserve.api.stores.opening import Stores
from vlmserve.api.stores.rows import StoreUnavailableError
from vlmserve_common.errors import BadRequestError, EngineError, EngineUnavailableError
from vlmserve_common.process.threads import check_wanted


def test_good_lines_are_answered_and_bad_ones_told(house: House) -> None:
    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        if body["say"] == "wrong":
            raise BadRequestError("no such thing", param="x")
        if body["say"] == "broken":
            raise EngineError("the engine failed")
        return await echo(body)

    long = line("long", body={"say": "x" * 2000})
    lines = [
        line("a"),
        "",
        "{",
        "[1]",
        line("a", body={"say": "twice"}),
        line(None),
        line(3),
        line("get", method="GET"),
        line("url", url="/v1/other"),
        line("nobody", body=3),
        line("stream", body={"stream": True}),
        line("more", more=1),
        line("many", body={"say": [0] * 100}),
        long,
        line("wrong"),
        line("broken"),
        line("z"),
    ]
    run_all(house, house.batch(*lines), ask)
    assert [o["response"]["body"]["said"] for o in house.written("output")] == ["a", "z"]
    errors = {
        (e["custom_id"], e["error"]["code"] if e["error"] else e["response"]["status_code"])
        for e in house.written("error")
    }
    assert errors == {
        (None, "invalid_json_line"),
        ("a", "duplicate_custom_id"),
        (None, "invalid_custom_id"),
        ("get", "invalid_method"),
        ("url", "invalid_url"),
        ("nobody", "invalid_body"),
        ("stream", "invalid_body"),
        ("more", "invalid_line"),
        (None, "too_many_values"),
        (None, "line_too_long"),
        ("wrong", 400),
        ("broken", 500),
    }
    batch = house.found()
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 16, 2, 14)
    assert batch.usage["total_tokens"] == 10
    assert sorted(house.asked) == ["a", "broken", "wrong", "z"]


def test_lines_are_counted_as_they_are_read(tmp_path: Path) -> None:
    for number, text in enumerate([b"", b"\n\n", b"a", b"a\n", b"a\n \r\nb", b"x" * 2**20 + b"\n" + b"y" * 2**21]):
        path = tmp_path / str(number)
        path.write_bytes(text)
        with path.open("rb") as one, path.open("rb") as other:
            lines = len(list(read_lines(other, URL, most_bytes=50, most_values=50)))
            with pytest.raises(BadRequestError, match="not blank") if lines == 0 else nullcontext():
                assert count_lines(one, 3) == lines


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], "empty_file"),
        ([""] * 9, "empty_file"),
        ([line(str(n)) for n in range(101)], "too_many_lines"),
        ([line("a"), *[""] * 101], "too_many_lines"),
    ],
)
def test_a_file_that_cannot_be_taken_fails_the_batch(house: House, lines: list[str], code: str) -> None:
    run_all(house, house.batch(*lines))
    assert house.found().status == "failed"
    assert house.found().problem[0] == code
    assert not house.asked


def test_of_many_blank_lines_a_part_is_read() -> None:
    class Endless(io.RawIOBase):
        def readinto(self, buffer: Any) -> int:
            buffer[:] = b"\n" * len(buffer)
            return len(buffer)

    with pytest.raises(
        BadRequestError, match=r"more than 50000 lines, blank ones included \(setting --max-batch-lines"
    ):
        count_lines(Endless(), 50_000)


def test_nobody_waits_for_a_batch_that_is_not_wanted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread looks."""
    began = threading.Event()

    def endless(*_: object) -> int:
        began.set()
        while True:
            check_wanted()

    monkeypatch.setattr(runner_module, "count_lines", endless)

    async def run() -> None:
        runner = house.runner()
        runner.run(house.batch(line("a")))
        await asyncio.to_thread(began.wait)
        await runner.stop()

    asyncio.run(run())
    assert house.found().status == "validating"


def test_the_next_server_answers_only_what_is_left(house: House) -> None:
    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        if body["say"] in ("c", "d"):
            house.gone = True
            raise EngineUnavailableError("gone")
        return await echo(body)

    batch = house.batch(*map(line, "abcdef"))
    run_all(house, batch, ask)
    assert house.found().status == "in_progress"
    before = house.journal.counts("batch_1")[0]
    assert before >= 2
    house.asked.clear()
    house.gone = False
    run_all(house, house.journal.claim())
    assert [o["custom_id"] for o in house.written("output")] == list("abcdef")
    assert len(house.asked) == 6 - before


def test_a_file_that_was_written_is_not_written_again(house: House) -> None:
    """The server ended between the writing and the telling."""
    batch = house.batch(line("a"))
    house.journal.add_lines(batch.id, [(1, True, {"custom_id": "a", "response": {"body": {}}})])
    first = write_file(house.files, house.journal, batch, "output")
    run_all(house, replace(batch, status="finalizing", outcome="completed"))
    assert house.found().output_file_id == first
    assert len(house.files.files("me")) == 2
    assert not house.asked


def test_a_full_engine_is_asked_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_AGAIN_S", 0.0)
    left = [BadRequestError("full", status=429), EngineUnavailableError("for a moment"), StoreUnavailableError("away")]

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        if left:
            raise left.pop()
        return await echo(body)

    run_all(house, house.batch(line("a")), ask)
    assert house.asked == ["a"] * 4
    assert house.found().completed == 1


def test_what_is_not_answered_in_time_is_told(house: House) -> None:
    batch = house.batch(*map(line, "abc"))
    house.journal.add_lines(batch.id, [(1, True, {"custom_id": "a", "response": {"body": {}}})])
    house.now = 2000.0
    run_all(house, replace(batch, status="in_progress", total=3))
    assert house.found().status == "expired"
    assert [o["custom_id"] for o in house.written("output")] == ["a"]
    assert {(e["custom_id"], e["error"]["code"]) for e in house.written("error")} == {
        (n, "batch_expired") for n in "bc"
    }
    assert not house.asked


def test_a_cancelled_batch_keeps_what_was_answered(house: House) -> None:
    async def run() -> Batch:
        waiting = asyncio.Event()

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            if body["say"] != "a":
                waiting.set()
                await asyncio.Event().wait()
            return await echo(body)

        runner, batch = house.runner(ask, concurrency=1), house.batch(*map(line, "abc"))
        runner.run(batch)
        await waiting.wait()
        cancelling = await runner.cancel(batch)
        await all_over(runner)
        return cancelling

    assert asyncio.run(run()).status == "cancelling"
    assert house.found().status == "cancelled"
    assert house.asked == ["a", "b"]
    assert [o["custom_id"] for o in house.written("output")] == ["a"]


def test_owners_take_turns_however_many_batches_they_have(stores: Stores) -> None:
    async def run(house: House) -> None:
        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            for _ in range(50):  # behind all that the other batches do before their next line
                await house.threads.run(int)
                await house.journal.threads.run(int)
            return await echo(body)

        runner = house.runner(ask, concurrency=1)
        batches = [house.batch(*map(line, "abcd"), id=f"batch_{number}") for number in range(3)]
        for batch in (*batches, house.batch(*map(line, "efgh"), id="batch_3", owner="you")):
            runner.run(batch)
        await all_over(runner)

    with ExitStack() as stack:
        house = House(stores, stack, max_files=8)
        asyncio.run(run(house))
    assert house.owners[:8].count("you") >= 3, "every second line, and not every fourth"
    assert house.owners.count("you") == 4


def test_slots_are_few_and_lines_wait_while_there_is_no_room(house: House) -> None:
    at_once: list[int] = []

    async def run() -> None:
        under_way, two = 0, asyncio.Barrier(2)

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            nonlocal under_way
            under_way += 1
            at_once.append(under_way)
            await two.wait()
            under_way -= 1
            return await echo(body)

        runner, looks = house.runner(ask), 0

        def has_room() -> bool:
            nonlocal looks
            looks += 1
            assert looks > 3 or not house.asked
            return looks > 3

        runner._has_room = has_room
        runner.run(house.batch(*map(line, "abcdefgh")))
        await all_over(runner)

    asyncio.run(run())
    assert len(house.asked) == 8
    assert max(at_once) == 2


def test_batches_of_others_are_not_found_and_limits_hold(house: House) -> None:
    batch = house.batch(line("a"))
    with pytest.raises(BadRequestError, match="there is no batch"):
        house.journal.find("you", batch.id)
    assert house.journal.batches("you") == []
    with pytest.raises(BadRequestError, match="--max-batches"):
        house.journal.add(replace(batch, id="batch_2"), 1)


def test_no_owner_takes_all_unfinished_batches(house: House) -> None:
    first = house.batch(line("a"))
    for number in range(2, 6):
        house.journal.add(replace(first, id=f"batch_{number}"), 10, shared=True)
    what = r"there are 5 batches .* the limit is 5, half of what other API keys leave of 10 \(setting --max-batches\)"
    with pytest.raises(BadRequestError, match=what):
        house.journal.add(replace(first, id="batch_6"), 10, shared=True)
    for number in range(6, 9):
        house.journal.add(replace(first, id=f"batch_{number}", owner="you"), 10, shared=True)
    with pytest.raises(BadRequestError, match="the limit is 3,"):
        house.journal.add(replace(first, id="batch_9", owner="you"), 10, shared=True)


def test_batches_hold_up_nobody_else(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than asyncio has threads, and none ends."""
    free, late = threading.Event(), []

    def slow_count(*_: object) -> int:
        if not free.wait(WAIT_S):
            late.append("too late")
        raise BadRequestError("enough")

    monkeypatch.setattr(runner_module, "count_lines", slow_count)
    uploaded = client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).json()
    body = {"input_file_id": uploaded["id"], "endpoint": URL, "completion_window": "24h"}
    for _ in range(33):
        made = client.post("/v1/batches", json=body)
    large = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "user": "x" * 300_000}
    response = client.post("/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 1}).json()
    answers = [
        made,
        client.get(f"/v1/batches/{made.json()['id']}"),
        client.get("/v1/files"),
        client.get(f"/v1/responses/{response['id']}"),
        client.post(URL, json=large),
    ]
    free.set()
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert late == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/rerank"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_what_cannot_be_a_batch(client: TestClient, served: Served, body: dict[str, Any], param: str) -> None:
    uploaded = client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).json()
    good = {"input_file_id": uploaded["id"], "endpoint": URL, "completion_window": "24h"}
    answer = client.post("/v1/batches", json={**good, **body})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    picture = client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "vision"}).json()
    answer = client.post("/v1/batches", json={**good, "input_file_id": picture["id"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_file_id")
    assert client.get("/v1/batches").json()["data"] == []
