"""Streams files into tensors: some threads read ahead while finished parts are copied to their device.

A file's part goes straight into its tensor where that lies in host memory and has the stored dtype. Otherwise it goes
through a ring of small staging buffers: `ahead` parts are being read or wait to be copied, the rest of the ring is on
its way. So a checkpoint of any size takes a few dozen MiB of host memory beside its tensors. Reading is `os.preadv`,
which lets other threads run; all else is done by the calling thread.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from vlmserve_common.compute.shard import Cut
from vlmserve_common.errors import CheckpointError

log = logging.getLogger(__name__)

_GB = 1e9
_EVERY_S = 5.0

Wait: TypeAlias = Callable[[], object]
"""Returns when a copy has left its source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """The place of a tensor, or of a part of it, in a file. start: byte offset.

    row: elements of a row in the file if only `shape[-1]` of them are wanted, from number `column` on; 0 if all are.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    row: int = 0
    column: int = 0

    def cut(self, cut: Cut) -> StoredTensor:
        """Return a part of a whole tensor: some of its rows or of its columns."""
        if cut.dim == 0:
            row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
            return replace(self, shape=(cut.size, *self.shape[1:]), start=self.start + cut.start * row_bytes)
        return replace(self, shape=(*self.shape[:-1], cut.size), row=cut.whole, column=cut.start)

    def at(self, index: int) -> StoredTensor:
        """Return one entry of the first dimension."""
        return replace(self.cut(Cut(0, index, 1, self.shape[0])), shape=self.shape[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The bytes of a stored tensor's file from `start` on that are `target` [n].

    `target` is [n, columns] for a tensor with rows. Whole rows are read, since files are mostly cached and small gaps
    save nothing.
    """

    stored: StoredTensor
    start: int
    target: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes in the file."""
        row, elements = self.stored.row, self.target.numel()
        return (elements // self.stored.shape[-1] * row if row else elements) * self.stored.dtype.itemsize

    def wanted(self, read: torch.Tensor) -> torch.Tensor:
        """Select the target's elements from the elements that were read, in the stored dtype."""
        row, first = self.stored.row, self.stored.column
        return read.view(-1, row)[:, first : first + self.stored.shape[-1]] if row else read

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes can be read into the target as they are."""
        return not self.stored.row and self.target.is_cpu and self.target.dtype == self.stored.dtype


class Copies:
    """Copies from staging buffers to a device. These are done when they return: for all devices except NVIDIA's."""

    def buffer(self, size: int) -> torch.Tensor:
        """Host memory to read into: uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8)

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait | None:
        """Begin to copy a part of a buffer, cast where dtypes differ. None: the source is free at once."""
        target.copy_(source)
        return None


class CudaCopies(Copies):
    """Copies from pinned memory on a CUDA stream of their own. A copy that does not block casts on the device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # kernels that used the targets' memory before may still run
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event().synchronize


def copies_to(device: torch.device) -> Copies:
    """Return the way to copy to a device."""
    return CudaCopies(device) if device.type == "cuda" else Copies()


def cut(part: Part, most: int) -> Iterator[Part]:
    """Cut a part into parts of at most `most` bytes, between entries of its target."""
    each = (part.stored.row or math.prod(part.target.shape[1:])) * part.stored.dtype.itemsize
    step = max(1, most // each)
    for first in range(0, len(part.target), step):
        start = part.start + first * each
        yield replace(part, start=start, target=part.target[first : first + step])


@dataclass
class _Slot:
    """A staging buffer and the copy that may still be leaving it."""

    buffer: torch.Tensor
    leaving: Wait | None = None

    def wait(self) -> None:
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            leaving()


class Stream:
    """Reads parts with a number of threads. part_bytes: the size of a buffer, and of the largest read.

    All targets are filled when `run` returns. It raises CheckpointError for files that are too short or unreadable.
    """

    def __init__(self, copies: Copies, *, threads: int, part_bytes: int) -> None:
        self._copies, self._threads, self._part_bytes = copies, threads, part_bytes
        self._ahead = 2 * threads  # so that one slow part leaves no thread idle
        self._ring: list[_Slot] = []
        self._used = 0

    def run(self, parts: Iterable[Part], done: Callable[[int], object]) -> None:
        """Fill all targets. done: called with the bytes of each part that has been read."""
        reads: deque[tuple[Part, Future[None], _Slot | None]] = deque()
        # reads end before files are closed
        with ExitStack() as files, ThreadPoolExecutor(self._threads, "checkpoint-reader") as pool:
            opened: dict[Path, int] = {}
            for whole in parts:
                for part in cut(whole, self._part_bytes):
                    if len(reads) == self._ahead:
                        self._finish(*reads.popleft(), done)
                    slot = None if part.is_direct else self._slot()
                    memory = part.target.view(torch.uint8) if slot is None else slot.buffer[: part.size]
                    if part.stored.file not in opened:
                        opened[part.stored.file] = _open(part.stored.file, files)
                    read = pool.submit(_fill, opened[part.stored.file], part, memory.numpy().data)
                    reads.append((part, read, slot))
            while reads:
                self._finish(*reads.popleft(), done)
            for slot in self._ring:
                slot.wait()

    def _finish(self, part: Part, read: Future[None], slot: _Slot | None, done: Callable[[int], object]) -> None:
        read.result()
        if slot is not None:
            source = part.wanted(slot.buffer[: part.size].view(part.stored.dtype))
            slot.leaving = self._copies.start(source, part.target.view(source.shape))
        done(part.size)

    def _slot(self) -> _Slot:
        size = 3 * self._threads
        if len(self._ring) < size:
            self._ring.append(_Slot(self._copies.buffer(self._part_bytes)))
        slot = self._ring[self._used % size]
        self._used += 1
        slot.wait()
        return slot


def _open(file: Path, until: ExitStack) -> int:
    try:
        number = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{file}: {error}") from error
    until.callback(os.close, number)
    return number


def _fill(file: int, part: Part, memory: memoryview) -> None:
    start = part.start
    while len(memory):
        try:
            count = os.preadv(file, [memory], start)
        except OSError as error:
            raise CheckpointError(f"{part.stored.file}: {error}") from error
        if not count:
            raise CheckpointError(f"{part.stored.file}: truncated while {part.stored.name} was read")
        memory, start = memory[count:], start + count


class Progress:
    """A line in the log every few seconds while `total` bytes are read. clock: seconds.

    One more line follows at the end of a gigabyte or more, and after other lines.
    """

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._read = 0
        self._begun = self._told = clock()

    def add(self, count: int) -> None:
        """Count bytes that were read."""
        self._read += count
        now = self._clock()
        if now - self._told >= _EVERY_S:
            self._told = now
            log.info("weights: %.1f of %.1f GB, %s", self._read / _GB, self._total / _GB, self._rate(now))

    def end(self) -> None:
        """Report the end: all bytes are in their tensors."""
        now = self._clock()
        if self._told > self._begun or self._total >= _GB:
            log.info("weights: %.1f GB in %.1f s, %s", self._total / _GB, now - self._begun, self._rate(now))

    def _rate(self, now: float) -> str:
        return f"{self._read / _GB / max(now - self._begun, 1e-9):.2f} GB/s"
