"""The embedding store in one process: what it keeps, what it evicts, and what goes wrong around it."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

from tests.vision.store_helpers import (
    ABOUT,
    FINGERPRINT,
    HEADER,
    Clock,
    bytes_on_disk,
    entry_files,
    file_of,
    holds,
    key,
    open_store,
    rows,
    temporary_files,
)
from vision.cache import durable_file
from vision.cache import store as embedding_store
from vision.cache.folder import EmbeddingFolder
from vlmserve_common.errors import EngineError

SIZE = HEADER + 1024  # of an entry
HOUR = 3600.0


@pytest.fixture
def clock():
    return Clock()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fill(store, clock, *numbers):
    """Put entries, a second after one another."""
    for number in numbers:
        clock.now += 1
        assert store.put(key(number), rows(number))


def kept(folder, *numbers):
    return {number for number in numbers if file_of(folder, number).exists()}


# --- keeping


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_come_back_as_they_were(tmp_path, dtype):
    store = open_store(tmp_path)
    assert store.get(key(0)) is None
    assert key(0) not in store
    with torch.inference_mode():  # as the encoder runs
        assert store.put(key(0), rows(0, dtype=dtype))
    special = torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-40]]).to(dtype)
    assert store.put(key(1), special.T)
    assert key(0) in store
    for again in (store, open_store(tmp_path)):
        assert holds(again, 0, dtype=dtype)
        got = again.get(key(1))
        assert torch.equal(got.view(torch.uint8), special.T.contiguous().view(torch.uint8))
        assert got.is_contiguous()
        got += 1  # memory of its own
        assert torch.equal(again.get(key(1)).view(torch.uint8), special.T.contiguous().view(torch.uint8))


def test_what_is_counted(tmp_path):
    store = open_store(tmp_path)
    assert store.put(key(0), rows(0))
    assert store.put(key(0), rows(0))
    assert store.put(key(1), rows(1))
    assert holds(store, 0)
    assert not holds(store, 2)
    file_of(tmp_path, 1).write_bytes(b"")
    assert not holds(store, 1)
    stats = store.stats()
    assert (stats.hits, stats.misses) == (1, 2)
    assert (stats.entries, stats.evictions, stats.bytes) == (2, 0, 2 * SIZE)  # of which it removed a damaged one
    assert open_store(tmp_path).stats().bytes == SIZE == bytes_on_disk(tmp_path)


def test_a_good_file_in_place_of_a_damaged_one_is_not_removed(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    assert store.put(key(0), rows(0))
    path = file_of(tmp_path, 0)
    shutil.copy(path, tmp_path / "good")
    path.write_bytes(b"damaged")
    real = embedding_store.read_entry

    def replaced_meanwhile(file, key):
        os.replace(tmp_path / "good", path)
        return real(file, key)

    with monkeypatch.context() as patch:
        patch.setattr(embedding_store, "read_entry", replaced_meanwhile)
        assert store.get(key(0)) is None
    assert holds(store, 0)


def test_a_folder_says_whose_embeddings_it_has(tmp_path):
    open_store(tmp_path / "made" / "here")
    assert stat.S_IMODE((tmp_path / "made" / "here").stat().st_mode) == 0o700
    about = tmp_path / "made" / "here" / "v1" / FINGERPRINT.hex() / "about.json"
    assert json.loads(about.read_text()) == {**ABOUT, "fingerprint": FINGERPRINT.hex()}
    open_store(tmp_path / "made" / "here", about={**ABOUT, "model": "renamed"})
    assert json.loads(about.read_text())["model"] == "a model"
    about.write_text("{")
    open_store(tmp_path / "made" / "here")
    assert json.loads(about.read_text())["model"] == "a model"


# --- the limit


def test_the_least_recently_used_goes_first(tmp_path, clock):
    store = open_store(tmp_path, limit=10 * SIZE, clock=clock)
    fill(store, clock, *range(10))
    clock.now += HOUR
    assert holds(store, 0)
    assert holds(store, 3)
    fill(store, clock, 10)
    assert kept(tmp_path, *range(11)) == {0, 3, *range(4, 11)}  # down to nine tenths with the new one
    assert store.stats().evictions == 2
    fill(store, clock, 11)
    assert kept(tmp_path, *range(12)) == {0, 3, *range(4, 12)}
    assert store.stats().bytes == bytes_on_disk(tmp_path) == 10 * SIZE
    assert store.stats().entries == 10


def test_entries_of_other_towers_are_evicted_too(tmp_path, clock):
    fill(open_store(tmp_path, clock=clock, fingerprint=bytes(32)), clock, *range(10))
    store = open_store(tmp_path, limit=10 * SIZE, clock=clock)
    fill(store, clock, 20)
    assert len(entry_files(tmp_path)) == 9
    assert not file_of(tmp_path, 0, bytes(32)).exists()
    assert holds(store, 20)


def test_a_lower_limit_counts_from_the_start(tmp_path, clock):
    fill(open_store(tmp_path, clock=clock), clock, *range(10))
    store = open_store(tmp_path, limit=5 * SIZE, clock=clock)
    assert kept(tmp_path, *range(10)) == {6, 7, 8, 9}
    assert store.stats().bytes == 4 * SIZE


def test_what_others_wrote_is_found_in_time(tmp_path, clock):
    """Each looks again before it has written more than a sixteenth of the limit."""
    limit = 160 * SIZE
    first, second = (open_store(tmp_path, limit=limit, clock=clock) for _ in range(2))
    fill(first, clock, *range(150))
    fill(second, clock, *range(200, 230))
    assert bytes_on_disk(tmp_path) <= limit * 17 // 16
    assert second.stats().evictions > 0


def test_an_entry_larger_than_the_limit_is_not_written(tmp_path, clock, caplog):
    store = open_store(tmp_path, limit=SIZE, clock=clock)
    fill(store, clock, 0)
    for number in (1, 2):
        assert not store.put(key(number), rows(number, width=65))
    assert kept(tmp_path, 0, 1, 2) == {0}
    assert len(warnings(caplog)) == 1
    assert f"takes no entry of {HEADER + 8 * 65 * 2} bytes: its limit is {SIZE}" in warnings(caplog)[0]
    fill(store, clock, 3)
    assert kept(tmp_path, 0, 3) == {3}


def test_use_is_noted_once_a_minute(tmp_path, clock):
    store = open_store(tmp_path, clock=clock)
    fill(store, clock, 0)
    written = clock.now
    clock.now += 59
    assert holds(store, 0)
    assert file_of(tmp_path, 0).stat().st_mtime == written
    clock.now += 1
    assert holds(store, 0)
    assert file_of(tmp_path, 0).stat().st_mtime == written + 60


# --- pins


def test_pinned_entries_stay(tmp_path, clock):
    store = open_store(tmp_path, limit=10 * SIZE, clock=clock)
    fill(store, clock, *range(3))
    assert store.put(key(0), rows(0), pin=True)
    assert store.put(key(1), rows(1), pin=True)
    assert store.put(key(50), rows(50), pin=True)
    fill(open_store(tmp_path, limit=10 * SIZE, clock=clock), clock, *range(3, 30))
    assert kept(tmp_path, 0, 1, 2, 50) == {0, 1, 50}
    EmbeddingFolder(tmp_path).unpin(file_of(tmp_path, 0))
    fill(store, clock, *range(30, 50))
    assert kept(tmp_path, 0, 1, 50) == {1, 50}
    assert holds(store, 50)


def test_pinned_entries_may_fill_it(tmp_path, clock, caplog, monkeypatch):
    store = open_store(tmp_path, limit=5 * SIZE, clock=clock)
    for number in range(4):
        assert store.put(key(number), rows(number), pin=True)
    fill(store, clock, 4)
    looks = []
    real = EmbeddingFolder.entries
    monkeypatch.setattr(EmbeddingFolder, "entries", lambda *a, **k: looks.append(1) or real(*a, **k))
    assert not store.put(key(5), rows(5, count=24))
    assert kept(tmp_path, 4) == {4}  # nothing was evicted in vain
    seen = len(looks)
    for number in range(10, 30):
        assert not store.put(key(number), rows(number, count=24))
    assert len(looks) == seen  # nor looked at for each
    assert len(warnings(caplog)) == 1
    assert f"pinned entries leave no {HEADER + 3072} bytes under {5 * SIZE}" in warnings(caplog)[0]


# --- threads


def test_threads_share_it(tmp_path):
    limit = 20 * SIZE
    store = open_store(tmp_path, limit=limit)
    start = threading.Barrier(4)

    def work(seed):
        random = Random(seed)
        start.wait()
        for _ in range(100):
            number = random.randrange(40)
            if not holds(store, number):
                assert store.put(key(number), rows(number))
                assert bytes_on_disk_now(tmp_path) <= limit
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    stats = store.stats()
    assert stats.hits + stats.misses == 400
    assert stats.hits > 0
    assert stats.evictions > 0
    assert (stats.bytes, stats.entries) == (bytes_on_disk(tmp_path), len(entry_files(tmp_path)))


def bytes_on_disk_now(folder):
    """While others evict."""
    return sum(entry.bytes for entry in EmbeddingFolder(folder).entries(now_s=0))


# --- what goes wrong


def test_a_full_disk_is_lived_with(tmp_path, clock, caplog, monkeypatch):
    store = open_store(tmp_path, clock=clock)
    fill(store, clock, 0)
    real = os.write

    def no_space(fd, data):
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2])

    monkeypatch.setattr(durable_file.os, "write", no_space)
    for number in (1, 2, 3):
        assert not store.put(key(number), rows(number), pin=number == 3)
        assert not holds(store, number)
    assert holds(store, 0)
    assert store.put(key(0), rows(0))
    assert len(warnings(caplog)) == 1
    assert "No space left" in warnings(caplog)[0]
    assert temporary_files(tmp_path) == []
    assert list(tmp_path.rglob("*.pin")) == []
    monkeypatch.undo()
    fill(store, clock, 1)
    assert holds(store, 1)


def test_a_broken_disk_is_lived_with(tmp_path, clock, caplog, monkeypatch):
    store = open_store(tmp_path, clock=clock)
    fill(store, clock, 0)

    def broken(file, key):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(embedding_store, "read_entry", broken)
    assert store.get(key(0)) is None
    assert store.get(key(0)) is None
    assert not store.put(key(0), rows(0))
    assert store.stats().misses == 2
    assert [text.split(":")[0].split()[-1] for text in warnings(caplog)] == ["without", "without"]  # read, and written
    monkeypatch.undo()
    assert holds(store, 0)


@pytest.fixture
def read_only(monkeypatch):
    """As if the file system were mounted read-only. Root may write where the mode says no, so modes will not do."""

    def switch():
        real_open, real_mkdir, real_access = os.open, os.mkdir, os.access

        def refuse(*args, **options):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(args[0]))

        def open_(path, flags, *args, **options):
            return (refuse if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) else real_open)(
                path, flags, *args, **options
            )

        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(
            os, "mkdir", lambda path, *a: real_mkdir(path, *a) if os.path.exists(path) else refuse(path)
        )
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real_access(path, mode))
        for name in ("unlink", "utime", "replace", "rename"):
            monkeypatch.setattr(os, name, refuse)

    return switch


@pytest.mark.parametrize("known", [True, False])
def test_a_folder_that_can_only_be_read_is_read(tmp_path, clock, caplog, read_only, known):
    fill(open_store(tmp_path, clock=clock), clock, 0, 1)
    file_of(tmp_path, 1).write_bytes(b"damaged")
    clock.now += HOUR
    read_only()
    store = open_store(tmp_path, limit=1, clock=clock, fingerprint=FINGERPRINT if known else bytes(32))
    assert len(warnings(caplog)) == 1
    assert str(tmp_path) in warnings(caplog)[0]
    assert holds(store, 0) == known
    assert not holds(store, 1)
    assert not store.put(key(2), rows(2))
    assert not store.put(key(0), rows(0), pin=True)
    assert len(warnings(caplog)) == 1
    assert store.stats().entries == 2
    assert len(entry_files(tmp_path)) == 2


@pytest.mark.parametrize("place", ["", "v1", f"v1/{FINGERPRINT.hex()}"])
def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path, place):
    path = tmp_path / "cache" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with pytest.raises(EngineError, match=r"cache.*\(setting --embedding-cache-dir\)") as caught:
        open_store(tmp_path / "cache")
    assert str(path) in str(caught.value)
    if not place:
        with pytest.raises(EngineError, match="Not a directory"):
            open_store(tmp_path / "cache" / "below")


def test_a_folder_that_cannot_be_made_or_listed_is_an_error(tmp_path, monkeypatch, read_only):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        with pytest.raises(EngineError, match="Permission denied"):
            open_store(tmp_path)
    read_only()
    with pytest.raises(EngineError, match=r"new: Read-only file system \(setting --embedding-cache-dir\)"):
        open_store(tmp_path / "new")


def test_other_files_in_the_folder_are_left_alone(tmp_path, clock):
    store = open_store(tmp_path, limit=3 * SIZE, clock=clock)
    fill(store, clock, 0)
    place = file_of(tmp_path, 0).parent
    for path in (tmp_path / "notes", tmp_path / "v1" / "notes", place / "notes", place / "short.safetensors"):
        path.write_bytes(bytes(5000))
    (place / f"{'0' * 64}.pin").touch()
    again = open_store(tmp_path, limit=3 * SIZE, clock=clock)
    assert again.stats().bytes == SIZE
    fill(again, clock, *range(1, 10))
    assert len(list(tmp_path.rglob("notes"))) == 3
    assert (place / "short.safetensors").exists()


def test_what_is_there_is_not_written_again(tmp_path):
    store = open_store(tmp_path)
    assert store.put(key(0), rows(0))
    before = file_of(tmp_path, 0).stat()
    assert store.put(key(0), rows(1))
    after = file_of(tmp_path, 0).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert holds(store, 0)


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path):
    store = open_store(tmp_path / "x")
    assert store.put(key(0), rows(0))
    shutil.rmtree(tmp_path / "x")
    assert not holds(store, 0)
    assert store.put(key(0), rows(0))
    assert holds(store, 0)
    assert (tmp_path / "x" / "v1" / FINGERPRINT.hex() / "about.json").exists()


def test_what_another_process_wrote_is_confirmed_when_its_name_is_on_disk(tmp_path, monkeypatch):
    assert open_store(tmp_path).put(key(0), rows(0))
    store, flushed = open_store(tmp_path), []
    monkeypatch.setattr(embedding_store, "flush_folder", flushed.append)
    assert store.put(key(0), rows(0))
    assert flushed == [file_of(tmp_path, 0).parent]
