"""Groups entries into batches for the workers: the part of the encoder pool that knows which worker has which batch."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TypeAlias

from vision.towers.temporal_patch import EncodeBatch, TemporalPatch
from vision.workers.backend import EncoderBackend

Order: TypeAlias = tuple[int, int]


class EntryState(enum.Enum):
    """The state of an entry; see `vision.encoder_pool`."""

    QUEUED = enum.auto()
    LOADING = enum.auto()
    WAITING = enum.auto()
    ENCODING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


UNDER_WAY = (EntryState.LOADING, EntryState.ENCODING)


@dataclass(eq=False)
class EncodeEntry:
    """One key that a request holds, or that is under way.

    `holders`: order and place of each holder, sorted. `last_save`: the number of the last save.
    """

    key: bytes
    patch: TemporalPatch
    nbytes: int
    holders: list[Order]
    state: EntryState = EntryState.QUEUED
    attempts: int = 0
    last_save: int | None = None
    encoded: bool = False
    saved: bool | None = None
    error: str = ""

    @property
    def order(self) -> Order:
        """Order and place of the first holder."""
        return self.holders[0]


@dataclass
class _Worker:
    """A worker's batches by number. `cancelled`: numbers of batches that are no longer wanted.

    `alone`: the worker retries one entry, and gets nothing else meanwhile.
    """

    batches: dict[int, list[EncodeEntry]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    alone: bool = False

    @property
    def patches(self) -> int:
        return sum(entry.patch.num_patches for batch in self.batches.values() for entry in batch)


class Batches:
    """The batches that workers have. `max_patches`: in a batch; a larger entry goes alone. `ahead`: batches of a worker
    at a time."""

    def __init__(self, backend: EncoderBackend, *, max_patches: int, ahead: int) -> None:
        self._backend = backend
        self._max_patches = max_patches
        self._ahead = ahead
        self._workers: dict[int, _Worker] = {}
        self._started = 0

    def start(self, waiting: list[EncodeEntry]) -> bool:
        """Give waiting entries to the workers, in order. Returns True if any was given. Needs a usable worker."""
        started = False
        workers = {number: self._workers.setdefault(number, _Worker()) for number in self._backend.workers()}
        while waiting:
            most = 1 if waiting[0].attempts else self._ahead
            free = [number for number, one in workers.items() if not one.alone and len(one.batches) < most]
            if not free:
                break
            number = min(free, key=lambda number: (workers[number].patches, number))
            self._start_batch(number, self._next_batch(waiting, workers[number], list(workers.values())))
            started = True
        return started

    def take(self, number: int) -> list[EncodeEntry]:
        """Remove a batch that has ended, and return its entries."""
        worker = next(worker for worker in self._workers.values() if number in worker.batches)
        worker.alone = False
        worker.cancelled.discard(number)
        return worker.batches.pop(number)

    def cancel_if_free(self, entry: EncodeEntry) -> None:
        """Cancel the batch of an entry that has no holder any more, if no entry of the batch has one."""
        for place, worker in self._workers.items():
            for number, batch in worker.batches.items():
                if entry in batch and number not in worker.cancelled and not any(other.holders for other in batch):
                    worker.cancelled.add(number)
                    self._backend.cancel(place, number)

    def _next_batch(self, waiting: list[EncodeEntry], worker: _Worker, workers: list[_Worker]) -> list[EncodeEntry]:
        """Take a worker's next batch from the front of the waiting entries. A retried entry goes alone.

        The batch brings the worker's load to an even share of all work, within the compute budget. It has at least one
        entry.
        """
        total = sum(entry.patch.num_patches for entry in waiting) + sum(other.patches for other in workers)
        target = min(self._max_patches, math.ceil(total / len(workers)) - worker.patches)
        batch = [waiting.pop(0)]
        patches = batch[0].patch.num_patches
        while waiting and not batch[0].attempts and not waiting[0].attempts:
            if waiting[0].patch.adapter != batch[0].patch.adapter:
                break
            patches += waiting[0].patch.num_patches
            if patches > target:
                break
            batch.append(waiting.pop(0))
        return batch

    def _start_batch(self, place: int, batch: list[EncodeEntry]) -> None:
        self._started += 1
        for entry in batch:
            entry.state = EntryState.ENCODING
        worker = self._workers[place]
        worker.alone = batch[0].attempts > 0
        worker.batches[self._started] = batch
        self._backend.start(place, EncodeBatch(number=self._started, patches=tuple(entry.patch for entry in batch)))
