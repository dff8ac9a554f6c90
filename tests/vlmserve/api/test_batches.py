"""Batches over fake endpoints: what becomes of each line, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import Served
from vlmserve.api.batches import runner as runner_module
from vlmserve.api.batches.journal import Batch, BatchJournal, count_lines, read_lines, write_file
from vlmserve.api.batches.runner import BatchRunner
from vlmserve.api.file_store import FileStore
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.requests import Caller
from vlmserve.frontend.tokenizer_manager import EngineUnavailableError
from vlmserve_common.errors import BadRequestError, EngineError

URL = "/v1/chat/completions"
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

    def runner(self, ask: Ask = _echo, concurrency: int = 2) -> BatchRunner:
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
            has_room=lambda: self.room,
            is_gone=lambda: self.gone,
            clock=lambda: self.now,
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
            assert count_lines(one) == len(list(read_lines(other, URL, most_bytes=50, most_values=50)))


@pytest.mark.parametrize(
    ("lines", "code"), [([], "empty_file"), ([_line(str(n)) for n in range(101)], "too_many_lines")]
)
def test_a_file_that_cannot_be_taken_fails_the_batch(house: House, lines: list[str], code: str) -> None:
    _run(house, house.batch(*lines))
    assert house.found().status == "failed"
    assert house.found().problem[0] == code
    assert not house.asked


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


def test_a_full_store_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_WRITE_AGAIN_S", 0.0)
    batch, others = house.batch(_line("a")), []
    for _ in range(4):
        with house.files.begin("other") as upload:
            others.append(upload.commit(filename="x", purpose="vision"))
    problems = []
    put = house.journal.put

    def watched_put(batch: Batch) -> None:
        put(batch)
        if batch.problem and not problems:
            problems.append(batch.problem)
            house.files.delete("other", others[0].id)

    monkeypatch.setattr(house.journal, "put", watched_put)
    _run(house, batch)
    assert "--max-files" in problems[0][1]
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
