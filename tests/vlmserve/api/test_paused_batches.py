"""Batches that find no room, on the disk or in the store of files."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.vlmserve.api.batch_house import House, all_over, line
from vlmserve.api.batches import runner as runner_module
from vlmserve.api.batches.journal import Batch
from vlmserve.api.stores.rows import StoreUnavailableError


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
        batch, runner = house.batch(*map(line, "abc")), house.runner(sleep=disk.sleep)
        runner.run(batch)
        await disk.paused.wait()
        seen = runner.seen(house.found())
        assert house.journal.counts(batch.id) == (done, 0)
        assert min(disk.slept) >= 1, "patiently"
        disk.freed.set()
        await all_over(runner)
        return seen

    seen = asyncio.run(run())
    assert (seen.status, seen.problem) == (status, ("storage_full", FULL))
    told = seen.as_json(completed=0, failed=0)["errors"]["data"]
    assert told == [{"code": "storage_full", "message": FULL, "param": None, "line": None}]
    assert (house.found().status, house.found().problem) == ("completed", None)
    assert [o["custom_id"] for o in house.written("output")] == ["a", "b", "c"]
    assert sorted(house.asked) == ["a", "b", "c"]


@pytest.mark.parametrize("place", ["open", "done", "counts"])
def test_what_cannot_be_read_now_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    async def run() -> tuple[str, str] | None:
        disk = FullDisk(monkeypatch)
        owner = house.files if place == "open" else house.journal
        batch, runner = house.batch(*map(line, "abc")), house.runner(sleep=disk.sleep)
        disk.fill((owner, place), error=lambda: StoreUnavailableError("no store"))
        runner.run(batch)
        await disk.paused.wait()
        problem = runner.seen(batch).problem
        disk.freed.set()
        await all_over(runner)
        return problem

    assert asyncio.run(run()) == ("store_unavailable", "the batch waits: no store")
    assert (house.found().status, house.found().problem) == ("completed", None)
    assert sorted(house.asked) == ["a", "b", "c"]


@pytest.mark.parametrize("finalizing", [False, True])
def test_a_batch_that_waits_for_room_can_be_cancelled(
    house: House, monkeypatch: pytest.MonkeyPatch, finalizing: bool
) -> None:
    """Its end is all that is written: the files are not waited for."""

    async def run() -> Batch:
        disk = FullDisk(monkeypatch)
        places = [(runner_module, "write_file"), (house.journal, "forget_lines")]
        disk.fill(*places, *([] if finalizing else [(house.journal, "add_lines")]), error=_no_space)
        batch, runner = house.batch(*map(line, "abc")), house.runner(sleep=disk.sleep)
        house.journal.add_lines(batch.id, [(1, True, {"response": {"body": {}}})]) if finalizing else None
        runner.run(batch)
        await disk.paused.wait()
        cancelling = await runner.cancel(runner.seen(house.found()))
        await all_over(runner)
        return cancelling

    assert asyncio.run(run()).status == "cancelling"
    batch = house.found()
    assert batch.status == "cancelled"
    house.journal.add(replace(batch, id="batch_2", status="validating"), 1)  # it does not count any more
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
        batch, runner = house.batch(line("a")), house.runner(sleep=disk.sleep)
        disk.fill((house.journal, "put"), (house.journal, "add_lines"), error=_database_full)
        runner.run(batch)
        await disk.paused.wait()
        disk.paused.clear()
        states = [(await runner.cancel(runner.seen(house.found()))).status]
        await disk.paused.wait()
        states += [runner.seen(house.found()).status, house.found().status]
        disk.freed.set()
        await all_over(runner)
        return states

    assert asyncio.run(run()) == ["cancelling", "cancelled", "validating"]
    assert house.found().status == "cancelled"


def test_a_full_store_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, others = house.batch(line("a")), []
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
        await all_over(runner)
        return problem

    code, message = asyncio.run(run())
    assert code == "too_many_files"
    assert "--max-files" in message
    assert house.found().status == "completed"
    assert house.found().problem is None
    assert [o["custom_id"] for o in house.written("output")] == ["a"]
