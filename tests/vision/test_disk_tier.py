"""Loading and saving beside the caller: wake-ups, the backlog, stores that raise, and the end."""

from __future__ import annotations

import select
import threading
from unittest.mock import MagicMock

import pytest
import torch

from vision.cache.disk_tier import DiskTier, Done, Loaded, Saved
from vision.cache.stats import TierStats
from vlmserve_common.process.wake_up import WakeUp

PATIENCE_S = 60.0


class Store:
    """A store that waits with its writes until `go` is set; `broken` raises."""

    def __init__(self) -> None:
        self.kept: dict[bytes, torch.Tensor] = {}
        self.written: list[tuple[bytes, bool]] = []
        self.broken = False
        self.refuses = False
        self.go = threading.Event()
        self.go.set()

    def __contains__(self, key: bytes) -> bool:
        return key in self.kept

    def get(self, key: bytes) -> torch.Tensor | None:
        if self.broken:
            raise RuntimeError("a broken store")
        return self.kept.get(key)

    def put(self, key: bytes, rows: torch.Tensor, *, pin: bool = False) -> bool:
        assert self.go.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError("a broken store")
        self.written.append((key, pin))
        self.kept[key] = rows
        return not self.refuses

    def stats(self) -> TierStats:
        return TierStats(entries=len(self.kept))


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def disk(store):
    disk = DiskTier(store, backlog_bytes=32)
    yield disk
    store.go.set()
    disk.close()


def rows(count: int) -> torch.Tensor:
    """8 bytes a row."""
    return torch.arange(count)[:, None]


def is_awake(disk: DiskTier, timeout_s: float = 0.0) -> bool:
    return bool(select.select([disk.wait_handle()], [], [], timeout_s)[0])


def wait_for(disk: DiskTier, count: int) -> list[Done]:
    done: list[Done] = []
    while len(done) < count:
        assert is_awake(disk, PATIENCE_S)
        done += disk.collect()
    assert len(done) == count
    return done


def test_a_load_wakes_who_waits_and_brings_the_rows_or_none(store, disk):
    store.kept[b"a"] = rows(3)
    assert not is_awake(disk)
    assert disk.collect() == []
    disk.load(b"a")
    [found] = wait_for(disk, 1)
    assert (found.key, found.embeds is store.kept[b"a"]) == (b"a", True)
    assert not is_awake(disk), "all is collected"
    disk.load(b"b")
    assert wait_for(disk, 1) == [Loaded(key=b"b", embeds=None)]


def test_a_save_wakes_who_waits_and_says_which_it_was_and_how_it_went(store, disk):
    number = disk.save(b"a", rows(2))
    assert disk.saving == 1
    assert wait_for(disk, 1) == [Saved(number=number, key=b"a", ok=True, new=True)]
    assert disk.saving == 0
    assert torch.equal(store.kept[b"a"], rows(2))
    store.refuses = True
    other = disk.save(b"a", rows(2), pin=True)
    assert other != number
    assert wait_for(disk, 1) == [Saved(number=other, key=b"a", ok=False)]
    assert store.written == [(b"a", False), (b"a", True)]
    assert disk.stats() == TierStats(entries=1)


def test_saves_are_written_in_order_and_a_load_does_not_wait_for_them(store, disk):
    store.kept[b"z"] = rows(1)
    store.go.clear()
    numbers = [disk.save(name, rows(1)) for name in (b"a", b"b", b"c")]
    disk.load(b"z")
    assert [one.key for one in wait_for(disk, 1)] == [b"z"]
    assert disk.saving == 3
    store.go.set()
    assert [one.number for one in wait_for(disk, 3)] == numbers
    disk.save(b"b", rows(1), pin=True)
    assert [(one.ok, one.new) for one in wait_for(disk, 1)] == [(True, False)], "it was there"
    store.written.pop()
    assert [key for key, _ in store.written] == [b"a", b"b", b"c"]


def test_above_the_backlog_only_what_is_insisted_on_is_saved(store, disk):
    store.go.clear()
    for name in (b"a", b"b"):
        disk.save(name, rows(2))
    assert not is_awake(disk)
    over = disk.save(b"c", rows(1))
    assert is_awake(disk), "who waits hears of it at once"
    assert disk.collect() == [Saved(number=over, key=b"c", ok=False)]
    disk.save(b"d", rows(9), insist=True)
    assert disk.saving == 3
    store.go.set()
    assert [one.key for one in wait_for(disk, 3) if one.ok] == [b"a", b"b", b"d"]
    disk.save(b"c", rows(4))
    assert wait_for(disk, 1)[0].ok, "there is room again"


def test_a_store_that_raises_is_a_miss_and_a_failed_save_and_is_logged(store, disk, caplog):
    store.broken = True
    disk.load(b"a")
    assert wait_for(disk, 1) == [Loaded(key=b"a", embeds=None)]
    assert "could not be read" in caplog.text
    number = disk.save(b"a", rows(4))
    assert wait_for(disk, 1) == [Saved(number=number, key=b"a", ok=False)]
    assert "could not be written" in caplog.text
    assert caplog.text.count("RuntimeError: a broken store") == 2
    store.broken = False
    disk.save(b"b", rows(4))
    assert wait_for(disk, 1)[0].ok, "the failed one no longer counts as waiting"


def test_more_wake_ups_than_the_pipe_holds_are_no_trouble():
    wake_up = WakeUp()
    for _ in range(70_000):
        wake_up.call()
    assert select.select([wake_up.fd], [], [], 0)[0]
    wake_up.take()
    assert not select.select([wake_up.fd], [], [], 0)[0]
    wake_up.close()


def test_flushing_waits_for_what_is_to_be_written_and_says_what_is_not_in_time(store, disk):
    assert disk.flush(PATIENCE_S) == 0
    store.go.clear()
    for name in (b"a", b"b", b"c"):
        disk.save(name, rows(1))
    assert disk.flush(0.01) == 3
    flushed: list[int] = []
    flushing = threading.Thread(target=lambda: flushed.append(disk.flush(PATIENCE_S)))
    flushing.start()
    store.go.set()
    flushing.join(PATIENCE_S)
    assert flushed == [0]
    assert [key for key, _ in store.written] == [b"a", b"b", b"c"]
    disk.save(b"d", rows(1))
    assert len(wait_for(disk, 4)) == 4, "it goes on"


def test_closing_writes_what_waits_to_be_written_and_may_be_done_again(store):
    disk = DiskTier(store)
    store.go.clear()
    for name in (b"a", b"b", b"c"):
        disk.save(name, rows(1))
    closing = threading.Thread(target=disk.close)
    closing.start()
    store.go.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert [key for key, _ in store.written] == [b"a", b"b", b"c"]
    disk.close()


def test_rows_of_a_gpu_are_copied_by_the_writer_behind_what_computed_them(store, monkeypatch):
    threads: list[str] = []
    cuda, on_gpu = MagicMock(), MagicMock(is_cuda=True, nbytes=24)
    on_gpu.cpu = lambda: threads.append(threading.current_thread().name) or torch.ones(3, 2)
    monkeypatch.setattr(torch, "cuda", cuda)
    store.go.clear()
    disk = DiskTier(store)
    disk.save(b"key", on_gpu)
    cuda.Event().record.assert_called_once_with(cuda.current_stream())
    store.go.set()
    disk.close()
    cuda.Stream().wait_event.assert_called_once_with(cuda.Event())
    cuda.stream.assert_called_once_with(cuda.Stream())
    assert threads[0].startswith("embedding-writer")
    assert torch.equal(store.kept[b"key"], torch.ones(3, 2))
