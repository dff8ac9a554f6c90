"""Uploaded files: owners, limits, expiry, and what a crash leaves."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from processors.inputs import Modality
from tests.processors.helpers import encoded, picture
from tests.vlmserve.own_stores import own_stores
from vlmserve.api.file_store import FileRecord, FileStore
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError, EngineError

LIMITS = ServerSettings(engine=EngineArgs(model=""), max_file_bytes=1000, max_file_store_bytes=2500, max_files=4)


class Clock:
    """Seconds since 1970, set by hand."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(stores, clock):
    store = FileStore(stores, LIMITS, clock=clock)
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path):
    """Of the bytes in `stores`."""
    return tmp_path / "stores"


@pytest.fixture
def again(clock, folder) -> Iterator[Callable[..., FileStore]]:
    """Opens a folder of one server's, after the last one left it."""
    with ExitStack() as stack:

        def make(limits: ServerSettings = LIMITS) -> FileStore:
            stack.close()
            store = FileStore(own_stores(folder, stack), limits, clock=clock)
            stack.callback(store.close)
            return store

        yield make


def put(store: FileStore, data: bytes = b"data", owner: str = "a", **fields) -> FileRecord:
    with store.begin(owner) as upload:
        upload.write(data)
        return upload.commit(**{"filename": "x.png", "purpose": "vision", **fields})


def content(store: FileStore, record: FileRecord) -> bytes:
    found, file = store.open(record.owner, record.id)
    with file:
        assert found == record
        return file.read()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".sqlite3" not in path.name)


def refused(function, *args, code, status=400, match=None, **kwargs):
    with pytest.raises(BadRequestError, match=match) as caught:
        function(*args, **kwargs)
    assert (caught.value.code, caught.value.status) == (code, status)


def test_a_file_is_kept_under_a_name_of_ours(store, folder):
    first, second = put(store, filename="../../etc/passwd"), put(store)
    assert re.fullmatch(r"file-[0-9a-f]{32}", first.id)
    assert (first.filename, first.created_at) == ("../../etc/passwd", 17 * 10**8)
    assert store.files("a") == [first, second]
    assert names(folder) == sorted(f"{r.id}.bin" for r in (first, second))


def test_files_of_one_server_are_its_users_alone(again, folder):
    put(again())
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_deleting(store, folder):
    record, other = put(store), put(store)
    _, file = store.open("a", record.id)
    store.delete("a", record.id)
    with file:
        assert file.read() == b"data", "who reads it may finish"
    for function in (store.find, store.open, store.delete):
        for name in (record.id, "no\0thing"):
            refused(function, "a", name, code="file_not_found", status=404)
    assert store.files("a") == [other]
    assert store.bytes == 4
    assert len(names(folder)) == 1


def test_all_files_together_are_limited_those_under_way_too(store):
    put(store, bytes(1000))
    with store.begin("a") as upload:
        upload.write(bytes(900))
        with store.begin("b") as other:
            other.write(bytes(600))
            refused(
                other.write,
                b"x",
                code="file_store_full",
                match="2501 bytes, the limit is 2500 .setting --max-file-store",
            )
    assert store.bytes == 1000
    put(store, bytes(1000))


def test_the_number_of_files_is_limited_those_under_way_too(store):
    records = [put(store) for _ in range(3)]
    upload = store.begin("a")
    refused(store.begin, "b", code="too_many_files", match=r"there are 4 files, the limit is 4 \(setting --max-files\)")
    upload.close()
    put(store)
    refused(store.begin, "b", code="too_many_files")
    store.delete("a", records[0].id)
    put(store, owner="b")


def test_no_owner_takes_all_files(store):
    store.shared = True
    records = [put(store) for _ in range(2)]
    refused(
        store.begin,
        "a",
        code="too_many_files",
        match=r"there are 2 files, the limit is 2, half of what other API keys leave of 4 \(setting --max-files\)",
    )
    put(store, owner="b")
    refused(store.begin, "b", code="too_many_files", match="the limit is 1,")
    put(store, owner="c")
    refused(store.begin, "a", code="too_many_files")
    store.delete("a", records[0].id)
    put(store, owner="d")


def test_no_owner_takes_all_bytes_those_under_way_too(store):
    store.shared = True
    put(store, bytes(1000))
    with store.begin("a") as upload:
        upload.write(bytes(250))
        what = r"1251 bytes, the limit is 1250, half of what other API keys leave of 2500 \(setting --max-file-store"
        refused(upload.write, b"x", code="file_store_full", match=what)
        with store.begin("b") as other:
            other.write(bytes(625))
            refused(other.write, b"x", code="file_store_full")
    put(store, bytes(625), owner="b")


def test_files_expire(store, clock, folder):
    record, longer, forever = put(store, expire_after_s=60), put(store, expire_after_s=90), put(store)
    assert record.expires_at == int(clock.now) + 60
    clock.now += 59
    assert len(store.files("a")) == 3
    clock.now += 1
    refused(store.find, "a", record.id, code="file_not_found", status=404)
    assert store.files("a") == [longer, forever]
    assert (store.bytes, len(names(folder))) == (8, 2)


def test_files_expire_by_the_setting(again, clock, folder):
    limits = replace(LIMITS, max_file_bytes=10, max_file_store_bytes=10, max_files=1, file_expire_after_s=60)
    store = again(limits)
    put(store)
    clock.now += 60
    put(store, expire_after_s=600)  # there is room again
    clock.now += 60
    assert len(store.files("a")) == 1
    clock.now += 600
    store = again(limits)
    assert (store.bytes, names(folder)) == (0, [])


def test_files_stay_across_restarts(again):
    store = again()
    png = encoded(picture(4, 4))
    records = [
        put(store, b"one"),
        put(store, png, owner="b", expire_after_s=60),
        put(store, b"three", filename="ü\n\0"),
    ]
    store = again()
    assert store.files("a") == [records[0], records[2]]
    assert store.files("b") == [records[1]]
    assert records[1].modality is Modality.IMAGE
    assert store.bytes == 8 + len(png)
    assert content(store, records[1]) == png
    last = put(store)
    assert store.files("a") == [records[0], records[2], last]


def test_files_are_in_the_order_in_which_uploads_end(store):
    with store.begin("a") as first, store.begin("a") as second:
        records = [upload.commit(filename="x", purpose="vision") for upload in (second, first)]
    assert store.files("a") == records


def test_what_was_not_finished_is_gone_after_a_restart(again, folder):
    store = again()
    record = put(store)
    store.begin("a").write(b"half")
    assert len(names(folder)) == 2
    (folder / "notes.txt").write_text("not ours")
    store = again()  # as if killed: the upload was never closed
    assert names(folder) == [f"{record.id}.bin", "notes.txt"]
    assert (store.bytes, store.files("a")) == (4, [record])


@pytest.mark.parametrize("damage", [b"dat", b"data.", None])
def test_a_damaged_file_is_not_served_and_not_deleted(store, folder, caplog, damage):
    record = put(store)
    path = folder / f"{record.id}.bin"
    path.unlink() if damage is None else path.write_bytes(damage)
    refused(store.open, "a", record.id, code="file_not_found", status=404)
    assert path.exists() == (damage is not None)
    assert damage is None or "is damaged" in caplog.text


def test_one_server_at_a_time(again, folder):
    again()
    with ExitStack() as stack, pytest.raises(EngineError, match=r"in use by another server \(setting --file-store-dir"):
        own_stores(folder, stack)


def test_many_threads(stores, folder):
    store = FileStore(stores, replace(LIMITS, max_file_bytes=100, max_file_store_bytes=10_000, max_files=100))

    def work(number: int) -> None:
        record = put(store, bytes([number]) * number, owner=str(number % 3))
        assert content(store, record) == bytes([number]) * number
        if number % 2:
            store.delete(record.owner, record.id)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    kept = [r for owner in "012" for r in store.files(owner)]
    assert sorted(r.bytes for r in kept) == list(range(0, 40, 2))
    assert store.bytes == sum(r.bytes for r in kept)
    assert len(names(folder)) == 20
    store.close()
