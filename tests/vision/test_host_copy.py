"""Rows leave a GPU in the writer's thread, behind what computed them and nothing else; fakes stand for the GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from vision.cache.disk_tier import DiskTier, HostCopy
from vision.cache.stats import TierStats


class OnGpu:
    """Rows on a GPU, as far as is asked of them here."""

    is_cuda, device, nbytes = True, "cuda:0", 24

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.copied_in = ""

    def cpu(self) -> torch.Tensor:
        self.calls.append(("copy",))
        self.copied_in = threading.current_thread().name
        return torch.ones(3, 2)


class Stream:
    def __init__(self, calls: list, name: str) -> None:
        self.calls, self.name = calls, name

    def wait_event(self, event: object) -> None:
        self.calls.append((self.name, "waits for", event))

    def __enter__(self) -> None:
        self.calls.append(("on", self.name))

    def __exit__(self, *_: object) -> None:
        self.calls.append(("off", self.name))


@pytest.fixture
def rows(monkeypatch) -> OnGpu:
    gpu = OnGpu()

    class Event:
        def record(self, stream: Stream) -> None:
            gpu.calls.append(("record", stream.name))

        def __eq__(self, other: object) -> bool:
            return other == "event"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(gpu.calls, "own"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(gpu.calls, "computing"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return gpu


def test_the_copy_waits_for_what_was_computed_before_it_was_asked_for(rows):
    copy = HostCopy(rows)
    assert rows.calls == [("record", "computing")]
    assert torch.equal(copy.take(), torch.ones(3, 2))
    assert rows.calls[1:] == [("on", "own"), ("own", "waits for", "event"), ("copy",), ("off", "own")]


def test_rows_on_the_cpu_are_not_copied():
    rows = torch.ones(3, 2)
    assert HostCopy(rows).take() is rows


class Store:
    trouble = ""

    def __init__(self) -> None:
        self.kept: dict[bytes, torch.Tensor] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self.kept

    def put(self, key: bytes, rows: torch.Tensor, *, pin: bool = False) -> bool:
        self.kept[key] = rows
        return True

    def stats(self) -> TierStats:
        return TierStats()


def test_saving_copies_nothing_in_the_caller_s_thread(rows):
    store = Store()
    disk = DiskTier(store)
    disk.save(b"key", rows)
    disk.close()
    assert rows.copied_in.startswith("embedding-writer")
    assert torch.equal(store.kept[b"key"], torch.ones(3, 2))
