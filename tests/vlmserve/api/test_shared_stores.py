"""Several servers over one PostgreSQL and one place for bytes: who does what, and what happens while either is away."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fsspec
import psycopg
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.postgres import PASSWORD, PostgresServer
from tests.vlmserve.api.batch_house import House, all_over, echo, line
from tests.vlmserve.api.fake_engine import MODEL
from tests.vlmserve.own_stores import own_stores
from tests.vlmserve.server_process import await_that
from vlmserve.api.batches import runner as runner_module
from vlmserve.api.batches.journal import LEASE_S, LeaseLostError
from vlmserve.api.batches.runner import BatchRunner
from vlmserve.api.control import shown_settings
from vlmserve.api.stores import postgres as postgres_module
from vlmserve.api.stores.contents import FsspecContents
from vlmserve.api.stores.postgres import Postgres
from vlmserve.api.stores.rows import Rows, StoreUnavailableError
from vlmserve.config.checks import SettingsError
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings, load_settings
from vlmserve_common.errors import BadRequestError, EngineError, EngineUnavailableError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_module, "_PATIENCE_S", 0.5)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def server(url: str, tmp_path: Path) -> Iterator[Callable[[], House]]:
    """Makes servers over the same stores."""
    with ExitStack() as stack:
        yield lambda: House(own_stores(tmp_path / "bytes", stack, url), stack)


@pytest.fixture
def both(server: Callable[[], House]) -> tuple[House, House]:
    return server(), server()


def _leave(house: House) -> None:
    """As if the server had died, and its leases had gone by."""
    with house.journal._database.transaction() as rows:
        rows.run("UPDATE leases SET until = 0")


# ---------------------------------------------------------------- files


def test_a_file_of_one_server_is_read_and_deleted_at_another(both: tuple[House, House]) -> None:
    one, other = both
    with one.files.begin("me") as upload:
        upload.write(b"some bytes")
        assert other.files.files("me") == [], "nobody sees what is not finished"
        record = upload.commit(filename="x", purpose="vision")
    assert other.files.files("me") == [record]
    found, file = other.files.open("me", record.id)
    with file:
        assert (found, file.read()) == (record, b"some bytes")
    with pytest.raises(BadRequestError, match="there is no file"):
        other.files.find("you", record.id)
    other.files.delete("me", record.id)
    with pytest.raises(BadRequestError, match="there is no file"):
        one.files.open("me", record.id)


def test_servers_share_the_limits(both: tuple[House, House], url: str) -> None:
    uploads = [both[number % 2].files.begin("me") for number in range(5)]
    for house in both:
        with pytest.raises(BadRequestError, match=r"there are 5 files, the limit is 5 \(setting --max-files"):
            house.files.begin("me")
    uploads.pop().close()
    with _after(both[0], url, both[1].files.begin, "me") as (rows, call):
        row = "INSERT INTO files (id, owner, bytes, ready, record) VALUES ('file-5', 'you', 0, 0, '')"
        rows.run(row)  # at the same time, another upload begins
    with pytest.raises(BadRequestError, match="there are 5 files"):
        call.result()
    for upload in uploads:
        upload.close()


def test_an_expired_file_is_removed_by_one_server(
    both: tuple[House, House], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = both
    with one.files.begin("me") as upload:
        record = upload.commit(filename="x", purpose="vision", expire_after_s=60)
    removed: list[str] = []
    monkeypatch.setattr(FsspecContents, "remove", lambda _, name: removed.append(name))
    other.files._clock = lambda: 10.0**10
    with _after(one, url, other.files.files, "me") as (rows, call):
        rows.run("UPDATE files SET ready = 0, expires_at = ?", 10**11)  # this server claims it
    assert call.result() == []
    assert removed == []
    one.files._clock = lambda: 10.0**12
    assert one.files.files("me") == []
    assert removed == [record.id]
    assert one.files.bytes == 0


@contextmanager
def _after(house: House, url: str, call: Callable[..., Any], *values: Any) -> Iterator[tuple[Rows, Future[Any]]]:
    """Call something that has to wait until this block's transaction has ended."""

    def is_waiting() -> bool:
        with psycopg.connect(url) as connection:
            return bool(connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall())

    with ThreadPoolExecutor(1) as pool, house.files._database.transaction(alone=True) as rows:
        future = pool.submit(call, *values)
        await_that(is_waiting, 10)
        yield rows, future


def test_what_a_server_left_is_removed_by_another(both: tuple[House, House], tmp_path: Path) -> None:
    upload = both[0].files.begin("me")
    upload.write(b"half")
    other = both[1].files
    assert other.bytes == 4
    now = other._clock()
    other._clock = lambda: now + 3599
    assert (other.files("me"), other.bytes) == ([], 4), "its server may be at work"
    other._clock = lambda: now + 3601
    assert (other.files("me"), other.bytes) == ([], 0)
    assert list((tmp_path / "bytes").iterdir()) == []
    with pytest.raises(BadRequestError, match="took too long"):
        upload.commit(filename="x", purpose="vision")
    upload.close()


def test_bytes_that_cannot_be_removed_now_are_removed_later(
    both: tuple[House, House], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = both
    with one.files.begin("me") as upload:
        record = upload.commit(filename="x", purpose="vision")
    with monkeypatch.context() as patch:
        patch.setattr(one.files._contents, "remove", _unreachable)
        one.files.delete("me", record.id)
    assert len(list((tmp_path / "bytes").iterdir())) == 1
    now = other.files._clock()
    other.files._clock = lambda: now + 61
    assert other.files.files("me") == []
    assert list((tmp_path / "bytes").iterdir()) == []


def _unreachable(*_: object) -> None:
    raise StoreUnavailableError("the store is away")


# ---------------------------------------------------------------- batches


def test_a_batch_has_one_server_at_a_time(both: tuple[House, House]) -> None:
    one, other = both
    batch = one.batch(line("a"))
    assert other.journal.claim() is None
    assert one.journal.renew() == {batch.id}
    _leave(one)
    with ThreadPoolExecutor(4) as pool:
        claims = list(pool.map(lambda house: house.journal.claim(), [one, other] * 2))
    assert [claim for claim in claims if claim] == [batch]
    one.journal.release()
    other.journal.release()
    assert other.journal.claim() == batch
    with pytest.raises(LeaseLostError):
        one.journal.put(batch)
    with pytest.raises(LeaseLostError):
        one.journal.add_lines(batch.id, [(1, True, {})])
    assert one.journal.counts(batch.id) == (1, 0), "an answer that is there stays"
    other.journal.put(batch)


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_another_server_goes_on_where_one_died(both: tuple[House, House], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were finished are not asked again, and what the dead one still says is not taken."""
    monkeypatch.setattr(runner_module, "_LEASES_S", 0.01)
    one, other = both

    async def run() -> BatchRunner:
        third, end = asyncio.Event(), asyncio.Event()

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            if body["say"] == "c":
                third.set()
                await end.wait()
            return await echo(body)

        first, second = one.runner(ask, concurrency=1), other.runner(concurrency=1)
        first.run(one.batch(*map(line, "abcdef")))
        second.start()
        await third.wait()
        assert other.asked == []
        _leave(one)  # it does not look, so it does not know
        await _until(lambda: one.found().has_ended)
        assert first.seen(one.found()).status == "in_progress"
        end.set()
        await all_over(first)
        await second.stop()
        return first

    first = asyncio.run(run())
    assert one.asked == ["a", "b", "c"]
    assert other.asked == ["c", "d", "e", "f"]
    assert one.found().status == first.seen(one.found()).status == "completed"
    assert [o["custom_id"] for o in one.written("output")] == list("abcdef")
    assert len(one.files.files("me")) == 2


def test_a_server_that_lost_its_lease_stops(both: tuple[House, House], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_LEASES_S", 0.01)
    one, other = both

    async def run() -> None:
        asked, cancelled = asyncio.Event(), asyncio.Event()

        async def ask(_: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            try:
                return await asyncio.Event().wait()  # type: ignore[return-value]
            finally:
                cancelled.set()

        first = one.runner(ask)
        first.start()
        first.run(one.batch(line("a")))
        await asked.wait()
        other.journal.take("me", "batch_1")
        await cancelled.wait()
        await first.stop()

    asyncio.run(run())
    assert other.journal.renew() == {"batch_1"}, "the lease of the other one stays"


def test_a_batch_is_cancelled_at_any_server(both: tuple[House, House], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_LEASES_S", 0.01)
    one, other = both

    async def run() -> None:
        second = asyncio.Event()

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            if body["say"] == "b":
                second.set()
                await asyncio.Event().wait()
            return await echo(body)

        here, there = one.runner(ask, concurrency=1), other.runner(concurrency=1)
        here.start()
        here.run(one.batch(*map(line, "abc")))
        await second.wait()
        assert (await there.cancel(there.seen(other.found()))).status == "cancelling"
        await all_over(there)
        await _until(lambda: not here._tasks)
        assert here.seen(one.found()).status == "cancelled"
        await here.stop()

    asyncio.run(run())
    assert other.asked == []
    assert [o["custom_id"] for o in other.written("output")] == ["a"]
    assert one.found().completed == 1


def test_a_server_that_stops_leaves_its_batches_at_once(both: tuple[House, House]) -> None:
    one, other = both

    async def run(gone: bool) -> None:
        asked = asyncio.Event()

        async def ask(_: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            if gone:
                one.gone = True
                raise EngineUnavailableError("the engine died")
            return await asyncio.Event().wait()  # type: ignore[return-value]

        runner = one.runner(ask)
        runner.run(one.found())
        await asked.wait()
        if gone:
            await all_over(runner)
        else:
            await runner.stop()

    batch = one.batch(line("a"))
    for gone in (False, True):
        asyncio.run(run(gone))
        claimed = other.journal.claim()
        assert claimed is not None
        assert claimed.id == batch.id
        one.journal.take("me", batch.id)


# ---------------------------------------------------------------- a database that is away


@pytest.fixture
def away(postgres: PostgresServer) -> Iterator[Callable[[], None]]:
    """Stops PostgreSQL, which is back after the test."""
    stopped: list[bool] = []
    yield lambda: (postgres.stop(), stopped.append(True))[0]
    if stopped and postgres._process.poll() is not None:
        postgres.start()


def test_a_database_that_is_away_is_named_and_waited_for(
    serve: Any, postgres: PostgresServer, url: str, tmp_path: Path, away: Callable[[], None], caplog: Any
) -> None:
    _, client = serve(database_url=url, file_store_url=f"local://{tmp_path}")
    file = client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).json()
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 1}
    response = client.post("/v1/responses", json=body).json()
    batch = {"input_file_id": "file-none", "endpoint": "/v1/responses", "completion_window": "24h"}
    part = {"type": "file", "file": {"file_id": file["id"]}}
    chat = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
    away()

    def asked() -> list[Any]:
        return [
            client.get("/v1/files"),
            client.get(f"/v1/files/{file['id']}"),
            client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}),
            client.get(f"/v1/responses/{response['id']}"),
            client.post("/v1/responses", json={**body, "previous_response_id": response["id"]}),
            client.post("/v1/batches", json=batch),
            client.get("/v1/batches"),
            client.post("/v1/chat/completions", json=chat),
        ]

    for answer in asked():
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "store_unavailable"), answer.text
        assert "--database-url" in error["message"]
        assert "Retry-After" in answer.headers
    text = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/v1/chat/completions", json=text).status_code == 200, "it needs no database"
    assert client.get("/health").status_code == 200
    postgres.start()
    while client.get("/v1/files").status_code == 503:
        pass
    assert [answer.status_code for answer in asked()] == [200] * 5 + [404, 200, 400]
    assert sum("does not answer" in record.message for record in caplog.records) == 1
    assert any("answers again" in record.message for record in caplog.records)
    _says_nothing_secret(caplog)


def test_a_batch_waits_for_the_database(
    server: Callable[[], House], postgres: PostgresServer, away: Callable[[], None]
) -> None:
    """No line is lost, nor asked twice, also where others look for batches."""
    house, other = server(), server()

    async def run() -> tuple[str, str] | None:
        waits = asyncio.Event()

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            if body["say"] == "b":
                await asyncio.to_thread(away)
            return await echo(body)

        async def sleep(_: float) -> None:
            if runner._waits:
                waits.set()
            await asyncio.sleep(0.05)

        runner, looking = house.runner(ask, concurrency=1, sleep=sleep), other.runner(sleep=sleep)
        batch = house.batch(*map(line, "abcd"))
        looking.start()
        runner.run(batch)
        await waits.wait()
        problem = runner.seen(batch).problem
        await asyncio.to_thread(postgres.start)
        await all_over(runner)
        await looking.stop()
        return problem

    problem = asyncio.run(run())
    assert problem is not None
    assert problem[0] == "store_unavailable"
    assert "the batch waits: the database" in problem[1]
    assert "--database-url" in problem[1]
    assert (house.asked, other.asked) == (list("abcd"), [])
    assert [o["custom_id"] for o in house.written("output")] == list("abcd")
    assert house.found().problem is None


def test_leases_that_nobody_could_renew_are_left_to_their_servers(
    both: tuple[House, House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as a lease lasts."""
    one, other = both
    batch = one.batch(line("a"))
    _leave(one)
    renew, looks, later = other.journal.renew, 0, 0.0
    clock = time.monotonic
    monkeypatch.setattr(runner_module.time, "monotonic", lambda: clock() + later)

    async def run() -> None:
        nonlocal later
        found: asyncio.Queue[bool] = asyncio.Queue()

        def renewed() -> set[str]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise StoreUnavailableError("away")
            return renew()

        async def sleep(_: float) -> None:
            found.put_nowait(bool(other.asked or runner._tasks))
            await asyncio.sleep(0)

        monkeypatch.setattr(other.journal, "renew", renewed)
        runner = other.runner(sleep=sleep)
        runner.start()
        assert [await found.get() for _ in range(3)] == [False] * 3
        later = LEASE_S + 1.0
        while not await found.get():
            pass
        await _until(lambda: one.found().has_ended)
        await runner.stop()

    asyncio.run(run())
    assert other.asked == ["a"]
    assert one.journal.find("me", batch.id).completed == 1


# ---------------------------------------------------------------- settings and their secrets


def _says_nothing_secret(caplog: Any) -> None:
    for secret in (PASSWORD, PASSWORD.split("/")[0], "%73"):
        assert secret not in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        {"database_url": "postgres:/me:hush@host/db", "file_store_url": "s3://b"},
        {"database_url": "mysql://me:hush@host/db", "file_store_url": "s3://b"},
        {"database_url": "postgresql://me:hush@host/db"},
        {"database_url": "postgresql://me:hush@host/db", "file_store_url": "s3://b", "file_store_dir": "/tmp"},
        {"file_store_url": "ftp:/me:hush@host"},
    ],
)
def test_wrong_settings_are_told_without_secrets(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"--database-url|--file-store-url") as caught:
        load_settings(given)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://me:hush@host/db?what=1", "postgresql://me:hu%zzsh@host/db"])
def test_a_url_that_cannot_be_read_is_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="--database-url cannot be read") as caught:
        Postgres(url)
    assert "hu" not in str(caught.value)


def test_a_database_that_cannot_be_used_ends_the_start(postgres: PostgresServer, caplog: Any) -> None:
    for bad in (postgres.url(password="hush hush"), postgres.url("none"), postgres.url() + "/gone"):
        with pytest.raises(EngineError, match=r"the database cannot be used: .*\(setting --database-url\)") as caught:
            Postgres(bad)
        for text in (str(caught.value), caplog.text):
            assert "hush" not in text
            assert PASSWORD not in text


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmserve.api.stores.postgres.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"--database-url needs psycopg: .*vlmserve\[postgres\]|\[postgres\]"):
        Postgres("postgresql://host/db")
    with pytest.raises(SettingsError, match="--file-store-url cannot be used: Protocol not known: nosuch"):
        FsspecContents("nosuch://place")


def test_the_urls_are_not_shown_by_the_server() -> None:
    engine = EngineArgs(model="m")
    shown = shown_settings(
        ServerSettings(engine=engine, database_url="postgresql://a:b@c/d", file_store_url="ftp://e:f@g")
    )
    assert (shown["database_url"], shown["file_store_url"]) == ("set", "set")


# ---------------------------------------------------------------- bytes elsewhere


def test_bytes_go_wherever_fsspec_reaches() -> None:
    contents = FsspecContents("memory://somewhere")
    file = contents.create("a")
    file.write(b"one\ntwo\n")
    contents.settle(file)
    assert fsspec.filesystem("memory").cat_file("/somewhere/a.bin") == b"one\ntwo\n"
    with contents.open("a") as found:
        assert found.seek(0, os.SEEK_END) == 8
        found.seek(0)
        assert list(found) == [b"one\n", b"two\n"]
    for _ in range(2):
        contents.remove("a")
    with pytest.raises(FileNotFoundError):
        contents.open("a")


def test_a_place_that_is_away_or_full_is_told(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    contents = FsspecContents("memory://someone:hush@somewhere")
    file = contents.create("a")

    def fails(error: Exception) -> Callable[..., Any]:
        def function(*_: object, **__: object) -> None:
            raise error

        return function

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", fails(TimeoutError("no answer to someone:hush")))
        patch.setattr(MemoryFileSystem, "rm_file", fails(RuntimeError("no way")))
        for call in (contents.open, contents.create, contents.remove):
            with pytest.raises(
                StoreUnavailableError, match=r"cannot be reached now: no .*\(setting --file-store-url\)"
            ) as told:
                call("a")
            assert "hush" not in str(told.value)
    monkeypatch.setattr(file._file, "write", fails(OSError(errno.ENOSPC, "no space")), raising=False)
    with pytest.raises(BadRequestError, match=r"is full \(setting --file-store-url\)") as full:
        file.write(b"x")
    assert full.value.status == 507
