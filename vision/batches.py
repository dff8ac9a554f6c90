"""Entries to batches, and batches to workers: the part of the encoder pool that knows which worker has what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vision.entries import Entry, State
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncoderBackend


@dataclass
class _Worker:
    """batches: by their numbers. cancelled: numbers of those that nobody wants any more. alone: it retries one entry,
    and gets nothing else meanwhile."""

    batches: dict[int, list[Entry]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    alone: bool = False

    @property
    def patches(self) -> int:
        return sum(entry.patch.num_patches for batch in self.batches.values() for entry in batch)


class Batches:
    """What is out. max_patches: of a batch; one larger entry goes alone. ahead: batches of a worker at a time."""

    def __init__(self, backend: EncoderBackend, *, max_patches: int, ahead: int) -> None:
        self._backend = backend
        self._max_patches = max_patches
        self._ahead = ahead
        self._workers: dict[int, _Worker] = {}
        self._started = 0

    def start(self, waiting: list[Entry]) -> bool:
        """Give the workers what waits for them, the first first; whether anything was given. Needs a usable worker."""
        started = False
        workers = {number: self._workers.setdefault(number, _Worker()) for number in self._backend.workers()}
        while waiting:
            free = [number for number, worker in workers.items() if self._has_room(worker, waiting[0])]
            if not free:
                break
            number = min(free, key=lambda number: (workers[number].patches, number))
            self._start_batch(number, self._next_batch(waiting, workers[number], list(workers.values())))
            started = True
        return started

    def take(self, number: int) -> list[Entry]:
        """The entries of a batch that has ended."""
        worker = next(worker for worker in self._workers.values() if number in worker.batches)
        worker.alone = False
        worker.cancelled.discard(number)
        return worker.batches.pop(number)

    def cancel_if_free(self, entry: Entry) -> None:
        """To be called when nobody holds an entry that is being encoded: cancel its batch if that is so for all."""
        for place, worker in self._workers.items():
            for number, batch in worker.batches.items():
                if entry in batch and number not in worker.cancelled and not any(other.holders for other in batch):
                    worker.cancelled.add(number)
                    self._backend.cancel(place, number)

    def _has_room(self, worker: _Worker, first: Entry) -> bool:
        return not worker.alone and len(worker.batches) < (1 if first.attempts else self._ahead)

    def _next_batch(self, waiting: list[Entry], worker: _Worker, workers: list[_Worker]) -> list[Entry]:
        """Take the next batch for a worker from the front: what makes its load an even share of all there is, within
        the compute budget, but one entry at least. What is retried goes alone."""
        total = sum(entry.patch.num_patches for entry in waiting) + sum(other.patches for other in workers)
        target = min(self._max_patches, math.ceil(total / len(workers)) - worker.patches)
        batch = [waiting.pop(0)]
        patches = batch[0].patch.num_patches
        while waiting and not batch[0].attempts and not waiting[0].attempts:
            patches += waiting[0].patch.num_patches
            if patches > target:
                break
            batch.append(waiting.pop(0))
        return batch

    def _start_batch(self, place: int, batch: list[Entry]) -> None:
        self._started += 1
        for entry in batch:
            entry.state = State.ENCODING
        worker = self._workers[place]
        worker.alone = batch[0].attempts > 0
        worker.batches[self._started] = batch
        self._backend.start(place, EncodeBatch(number=self._started, patches=tuple(entry.patch for entry in batch)))
