"""Streaming files into tensors: the ring of staging buffers, copies that end late, errors, memory, progress."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest
import torch

from vlmserve_common.checkpoint.stream import Copies, Part, Progress, StoredTensor, Stream, cut
from vlmserve_common.compute.shard import Cut
from vlmserve_common.errors import CheckpointError

THREADS, PART_BYTES = 3, 64


class LateCopies:
    """Copies that read their source as late as they may: when they are waited for, as a busy device's do."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.waiting = self.most_waiting = 0

    def buffer(self, size: int) -> torch.Tensor:
        self.buffers.append(torch.empty(size, dtype=torch.uint8))
        return self.buffers[-1]

    def start(self, source: torch.Tensor, target: torch.Tensor):
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)

        def wait() -> None:
            self.waiting -= 1
            target.copy_(source)

        return wait


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(torch.randn(5000, generator=torch.Generator().manual_seed(0)).numpy().tobytes())
    return path


def numbers(file: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)


def part_of(file: Path, first: int, target: torch.Tensor) -> Part:
    stored = StoredTensor(name=f"t{first}", file=file, dtype=torch.float32, shape=tuple(target.shape), start=4 * first)
    return Part(stored=stored, start=stored.start, target=target)


def test_copies_that_end_late_find_their_bytes_and_the_ring_stays_small(file):
    copies, told = LateCopies(), []
    targets = [torch.full((size,), float("nan"), dtype=torch.float64) for size in (3000, 1, 0, 700, 1299)]
    parts, first = [], 0
    for target in targets:
        parts.append(part_of(file, first, target))
        first += len(target)
    Stream(copies, threads=THREADS, part_bytes=PART_BYTES).run(parts, told.append)
    assert torch.equal(torch.cat(targets), numbers(file).double())
    assert sum(told) == file.stat().st_size
    assert copies.waiting == 0
    assert copies.most_waiting > THREADS  # what was read travels while more is read
    assert len(copies.buffers) == 3 * THREADS
    assert {len(buffer) for buffer in copies.buffers} == {PART_BYTES}


def test_parts_that_need_no_copy_go_straight_into_their_tensors(file):
    class NoCopies:
        def buffer(self, size: int) -> torch.Tensor:
            raise AssertionError("nothing is staged")

        start = buffer

    target = torch.zeros(5002)
    Stream(NoCopies(), threads=THREADS, part_bytes=PART_BYTES).run([part_of(file, 0, target[1:-1])], int)
    assert torch.equal(target[1:-1], numbers(file))
    assert not target[[0, -1]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_that_ends_early_is_refused_with_the_tensors_name(file, dtype):
    first, second = torch.zeros(2000, dtype=dtype), torch.zeros(3001, dtype=dtype)
    stream = Stream(LateCopies(), threads=THREADS, part_bytes=PART_BYTES)
    with pytest.raises(CheckpointError, match="data: truncated while t2000 was read"):
        stream.run([part_of(file, 0, first), part_of(file, 2000, second)], int)


def test_a_file_that_is_gone_is_named(file):
    stream = Stream(LateCopies(), threads=THREADS, part_bytes=PART_BYTES)
    with pytest.raises(CheckpointError, match=r"data2: .*No such file"):
        stream.run([part_of(file.with_name("data2"), 0, torch.zeros(4))], int)


def test_copies_that_fail_are_told(file):
    class Failing(LateCopies):
        def start(self, source: torch.Tensor, target: torch.Tensor):
            raise RuntimeError("out of memory")

    stream = Stream(Failing(), threads=THREADS, part_bytes=PART_BYTES)
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.run([part_of(file, 0, torch.zeros(5000, dtype=torch.float64))], int)


def test_parts_are_cut_at_whole_elements(file):
    target = torch.zeros(40)
    sizes = [(part.start, len(part.target)) for part in cut(part_of(file, 10, target), 63)]
    assert sizes == [(40, 15), (100, 15), (160, 10)]


def test_columns_are_read_a_few_rows_at_a_time(file):
    whole = StoredTensor(name="t", file=file, dtype=torch.float32, shape=(500, 10), start=0)
    part = Part(stored=whole.cut(Cut(1, 3, 4, 10)), start=0, target=torch.zeros(500, 4))
    Stream(LateCopies(), threads=THREADS, part_bytes=100).run([part], int)
    assert torch.equal(part.target, numbers(file).view(500, 10)[:, 3:7])


def test_progress_is_told_every_few_seconds_and_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    now = [100.0]
    progress = Progress(int(8e9), clock=lambda: now[0])
    for _ in range(8):
        now[0] += 2
        progress.add(int(1e9))
    progress.end()
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 3.0 of 8.0 GB, 0.50 GB/s",
        "weights: 6.0 of 8.0 GB, 0.50 GB/s",
        "weights: 8.0 GB in 16.0 s, 0.50 GB/s",
    ]


def test_progress_of_small_checkpoints_is_not_told(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(1000)
    progress.add(1000)
    progress.end()
    assert not caplog.records


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_tensors_for_another_device_have_no_second_copy_in_host_memory(tmp_path):
    size, part_bytes = 256 * 1024**2, 1024**2
    file = tmp_path / "data"
    with file.open("wb") as sparse:
        sparse.truncate(size)
    targets = [torch.empty(size // 8, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    parts = [part_of(file, number * size // 8, target) for number, target in enumerate(targets)]
    most, before = 0, resident_bytes()

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, resident_bytes() - before)

    Stream(Copies(), threads=THREADS, part_bytes=part_bytes).run(parts, watch)
    assert most < 32 * 1024**2
