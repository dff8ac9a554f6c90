"""Batches over fake endpoints: what becomes of each line, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import MODEL, WAIT_S, Served
from vlmserve.api.batches import runner as runner_module
from vlmserve.api.batches.journal import Batch, BatchJournal, count_lines, read_lines, write_file
from vlmserve.api.batches.runner import BatchRunner
from vlmserve.api.file_store import FileStore
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.requests import Caller
from vlmserve.frontend.tokenizer_manager import EngineUnavailableError
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.threads import Threads, check_wanted

URL = "/v1/chat/completions"
Sleep = Callable[[float], Awaitable[None]]
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def _line(name: Any, **changes: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {"say": name}, **changes})


async def _echo(body: dict[str, Any]) -> dict[str, Any]:
    return {"said": body["say"], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


class House:
    """A store, a journal, and runners over them. asked: the bodies that came to the endpoint."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.files = FileStore(folder, ServerSettings(engine=EngineArgs(model="m"), max_files=5))
        stack.callback(self.files.close)
        self.journal = BatchJournal(folder)
        stack.callback(self.journal.close)
        self.threads = Threads("batch-files", 2)
        stack.callback(self.threads.close)
        self.asked: list[str] = []
        self.now = 1000.0
        self.room = True
        self.gone = False

    def batch(self, *lines: str) -> Batch:
        with self.files.begin("me") as upload:
            upload.write("\n".join(lines).encode())
            record = upload.commit(filename="in.jsonl", purpose="batch")
        batch = Batch(
            id="batch_1",
            owner="me",
            client="c",
            tenant="mine",
            endpoint=URL,
            input_file_id=record.id,
            completion_window="24h",
            metadata={},
            created_at=1000,
            expires_at=2000,
        )
        self.journal.add(batch, 10)
        return batch

    def runner(self, ask: Ask = _echo, concurrency: int = 2, sleep: Sleep = asyncio.sleep) -> BatchRunner:
        async def endpoint(body: dict[str, Any], caller: Caller) -> dict[str, Any]:
            assert (caller.owner, caller.tenant, caller.priority) == ("me", "mine", 2**31 - 1)
            self.asked.append(body["say"])
            return await ask(body)

        return BatchRunner(
            self.journal,
            self.files,
            {URL: endpoint},
            ServerSettings(
                engine=EngineArgs(model="m", schedule_policy="priority"),
                batch_concurrency=concurrency,
                max_batch_lines=100,
                max_body_mib=1000 / 2**20,
                max_json_values=100,
            ),
            self.threads,
            has_room=lambda: self.room,
            is_gone=lambda: self.gone,
            clock=lambda: self.now,
            sleep=sleep,
        )

    def found(self) -> Batch:
        return self.journal.find("me", "batch_1")

    def written(self, kind: str) -> list[dict[str, Any]]:
        file_id = getattr(self.found(), f"{kind}_file_id")
        if file_id is None:
            return []
        _, file = self.files.open("me", file_id)
        with file:
            return [json.loads(line) for line in file]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(tmp_path, stack)


async def _all_over(runner: BatchRunner) -> None:
    await asyncio.gather(*runner._tasks.values())


def _run(house: House, batch: Batch, ask: Ask = _echo) -> None:
    async def run() -> None:
        runner = house.runner(ask)
        runner.run(batch)
        await _all_over(runner)

    asyncio.run(run())


def test_good_lines_are_answered_and_bad_ones_told(house: House) -> None:
    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        if body["say"] == "wrong":
            raise BadRequestError("no such thing", param="x")
        if body["say"] == "broken":
            raise EngineError("the engine failed")
        return await _echo(body)

    long = _line("long", body={"say": "x" * 2000})
    lines = [
        _line("a"),
        "",
        "{",
        "[1]",
        _line("a", body={"say": "twice"}),
        _line(None),
        _line(3),
        _line("get", method="GET"),
        _line("url", url="/v1/other"),
        _line("nobody", body=3),
        _line("stream", body={"stream": True}),
        _line("more", more=1),
        _line("many", body={"say": [0] * 100}),
        long,
        _line("wrong"),
        _line("broken"),
        _line("z"),
    ]
    _run(house, house.batch(*lines), ask)
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
        ([_line(str(n)) for n in range(101)], "too_many_lines"),
        ([_line("a"), *[""] * 101], "too_many_lines"),
    ],
)
def test_a_file_that_cannot_be_taken_fails_the_batch(house: House, lines: list[str], code: str) -> None:
    _run(house, house.batch(*lines))
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
        runner.run(house.batch(_line("a")))
        await asyncio.to_thread(began.wait)
        await runner.stop()

    asyncio.run(run())
    assert house.found().status == "validating"


def test_the_next_server_answers_only_what_is_left(house: House) -> None:
    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        if body["say"] in ("c", "d"):
            house.gone = True
            raise EngineUnavailableError("gone")
        return await _echo(body)

    batch = house.batch(*map(_line, "abcdef"))
    _run(house, batch, ask)
    assert house.found().status == "in_progress"
    before = house.journal.counts("batch_1")[0]
    assert before >= 2
    house.asked.clear()
    house.gone = False
    _run(house, house.journal.unfinished()[0])
    assert [o["custom_id"] for o in house.written("output")] == list("abcdef")
    assert len(house.asked) == 6 - before


def test_a_file_that_was_written_is_not_written_again(house: House) -> None:
    """The server ended between the writing and the telling."""
    batch = house.batch(_line("a"))
    house.journal.add_lines(batch.id, [(1, True, {"custom_id": "a", "response": {"body": {}}})])
    first = write_file(house.files, house.journal, batch, "output")
    _run(house, replace(batch, status="finalizing", outcome="completed"))
    assert house.found().output_file_id == first
    assert len(house.files.files("me")) == 2
    assert not house.asked


def test_a_full_engine_is_asked_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_AGAIN_S", 0.0)
    left = [BadRequestError("full", status=429), EngineUnavailableError("for a moment")]

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        if left:
            raise left.pop()
        return await _echo(body)

    _run(house, house.batch(_line("a")), ask)
    assert house.asked == ["a"] * 3
    assert house.found().completed == 1


class FullDisk:
    """The functions that `fill` replaces fail until it is `freed`. Runners sleep in `sleep` until then; `paused` is set
    when one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.paused, self.freed = asyncio.Event(), asyncio.Event()
        self.slept: list[float] = []

    def fill(self, *places: tuple[object, str], error: Callable[[], Exception]) -> None:
        for owner, name in places:
            self.patch.setattr(owner, name, self._failing(getattr(owner, name), error))

    def _failing(self, function: Callable[..., Any], error: Callable[[], Exception]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            if not self.freed.is_set():
                raise error()
            return function(*args, **kwargs)

        return write

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.paused.set()
        await self.freed.wait()


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _database_full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


FULL = "the batch waits: the server's disk is full (setting --file-store-dir)"


@pytest.mark.parametrize(
    ("place", "error", "status", "done"),
    [
        ("put", _database_full, "in_progress", 0),
        ("add_lines", _database_full, "in_progress", 0),
        ("write_file", _no_space, "finalizing", 3),
    ],
)
def test_a_full_disk_is_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch, place: str, error: Callable[[], Exception], status: str, done: int
) -> None:
    """And the batch says so. No line is lost, nor asked twice."""

    async def run() -> Batch:
        disk = FullDisk(monkeypatch)
        disk.fill((runner_module if place == "write_file" else house.journal, place), error=error)
        batch, runner = house.batch(*map(_line, "abc")), house.runner(sleep=disk.sleep)
        runner.run(batch)
        await disk.paused.wait()
        seen = runner.seen(house.found())
        assert house.journal.counts(batch.id) == (done, 0)
        assert min(disk.slept) >= 1, "patiently"
        disk.freed.set()
        await _all_over(runner)
        return seen

    seen = asyncio.run(run())
    assert (seen.status, seen.problem) == (status, ("storage_full", FULL))
    told = seen.as_json(completed=0, failed=0)["errors"]["data"]
    assert told == [{"code": "storage_full", "message": FULL, "param": None, "line": None}]
    assert (house.found().status, house.found().problem) == ("completed", None)
    assert [o["custom_id"] for o in house.written("output")] == ["a", "b", "c"]
    assert sorted(house.asked) == ["a", "b", "c"]
    assert house.journal.unfinished() == []


@pytest.mark.parametrize("finalizing", [False, True])
def test_a_batch_that_waits_for_room_can_be_cancelled(
    house: House, monkeypatch: pytest.MonkeyPatch, finalizing: bool
) -> None:
    """Its end is all that is written: the files are not waited for."""

    async def run() -> Batch:
        disk = FullDisk(monkeypatch)
        places = [(runner_module, "write_file"), (house.journal, "forget_lines")]
        disk.fill(*places, *([] if finalizing else [(house.journal, "add_lines")]), error=_no_space)
        batch, runner = house.batch(*map(_line, "abc")), house.runner(sleep=disk.sleep)
        house.journal.add_lines(batch.id, [(1, True, {"response": {"body": {}}})]) if finalizing else None
        runner.run(batch)
        await disk.paused.wait()
        cancelling = await runner.cancel(runner.seen(house.found()))
        await _all_over(runner)
        return cancelling

    assert asyncio.run(run()).status == "cancelling"
    batch = house.found()
    assert batch.status == "cancelled"
    assert house.journal.unfinished() == [], "it does not count any more"
    assert batch.output_file_id is None
    assert batch.problem == (
        None
        if not finalizing
        else (
            "output_file_lost",
            "the batch is cancelled without its output file, for which there is no room: the server's disk is full "
            "(setting --file-store-dir)",
        )
    )


def test_a_cancelled_batch_is_seen_as_that_while_nothing_can_be_written(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[str]:
        disk = FullDisk(monkeypatch)
        batch, runner = house.batch(_line("a")), house.runner(sleep=disk.sleep)
        disk.fill((house.journal, "put"), (house.journal, "add_lines"), error=_database_full)
        runner.run(batch)
        await disk.paused.wait()
        disk.paused.clear()
        states = [(await runner.cancel(runner.seen(house.found()))).status]
        await disk.paused.wait()
        states += [runner.seen(house.found()).status, house.found().status]
        disk.freed.set()
        await _all_over(runner)
        return states

    assert asyncio.run(run()) == ["cancelling", "cancelled", "validating"]
    assert house.found().status == "cancelled"


def test_a_full_store_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, others = house.batch(_line("a")), []
    for _ in range(4):
        with house.files.begin("other") as upload:
            others.append(upload.commit(filename="x", purpose="vision"))

    async def run() -> tuple[str, str] | None:
        disk = FullDisk(monkeypatch)
        runner = house.runner(sleep=disk.sleep)
        runner.run(batch)
        await disk.paused.wait()
        problem = runner.seen(house.found()).problem
        house.files.delete("other", others[0].id)
        disk.freed.set()
        await _all_over(runner)
        return problem

    code, message = asyncio.run(run())
    assert code == "too_many_files"
    assert "--max-files" in message
    assert house.found().status == "completed"
    assert house.found().problem is None
    assert [o["custom_id"] for o in house.written("output")] == ["a"]


def test_what_is_not_answered_in_time_is_told(house: House) -> None:
    batch = house.batch(*map(_line, "abc"))
    house.journal.add_lines(batch.id, [(1, True, {"custom_id": "a", "response": {"body": {}}})])
    house.now = 2000.0
    _run(house, replace(batch, status="in_progress", total=3))
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
            return await _echo(body)

        runner, batch = house.runner(ask, concurrency=1), house.batch(*map(_line, "abc"))
        runner.run(batch)
        await waiting.wait()
        cancelling = await runner.cancel(batch)
        await _all_over(runner)
        return cancelling

    assert asyncio.run(run()).status == "cancelling"
    assert house.found().status == "cancelled"
    assert house.asked == ["a", "b"]
    assert [o["custom_id"] for o in house.written("output")] == ["a"]


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
            return await _echo(body)

        runner, looks = house.runner(ask), 0

        def has_room() -> bool:
            nonlocal looks
            looks += 1
            assert looks > 3 or not house.asked
            return looks > 3

        runner._has_room = has_room
        runner.run(house.batch(*map(_line, "abcdefgh")))
        await _all_over(runner)

    asyncio.run(run())
    assert len(house.asked) == 8
    assert max(at_once) == 2


def test_batches_of_others_are_not_found_and_limits_hold(house: House) -> None:
    batch = house.batch(_line("a"))
    with pytest.raises(BadRequestError, match="there is no batch"):
        house.journal.find("you", batch.id)
    assert house.journal.batches("you") == []
    with pytest.raises(BadRequestError, match="--max-batches"):
        house.journal.add(replace(batch, id="batch_2"), 1)


def test_no_owner_takes_all_unfinished_batches(house: House) -> None:
    first = house.batch(_line("a"))
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
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
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
