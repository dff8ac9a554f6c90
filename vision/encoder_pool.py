"""Everything between a request's temporal patches and their rows: who waits, what is found, what is encoded where.

A temporal patch is known by its embedding key. Whoever needs its rows holds the key (`submit`) until they are used or
given up (`release`); identical content is found, loaded or encoded once for all who hold it. On the way an entry is

    QUEUED -> LOADING (from disk) -> QUEUED (not there) -> ENCODING -> READY
                     `-> READY                                `-> QUEUED, once more and alone -> FAILED

Two budgets: a batch has `max_patches` patches (compute; one larger picture goes alone), and the rows that are held or
under way have `space_bytes` (space; one larger goes when nothing else is there). Entries start in the order of their
requests, and none overtakes one that has no room, so the oldest request always gets on. Not thread-safe, never blocks.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from vision.backend import EncodeBatch, EncoderBackend, EncodeResult
from vision.disk_tier import DiskTier, Loaded
from vision.embedding_cache import EmbeddingCache
from vision.embedding_stats import PoolStats
from vision.temporal_patch import TemporalPatch, embedding_key

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """max_patches: in a batch. space_bytes: of rows held or under way. batches_ahead: given to a worker at a time."""

    max_patches: int
    space_bytes: int
    batches_ahead: int = 2


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Of a tower's rows. merge: patches a side that become a row. width: elements of a row, DeepStack's included."""

    merge: int
    width: int
    dtype: torch.dtype

    def nbytes(self, patch: TemporalPatch) -> int:
        """Bytes of a temporal patch's rows."""
        h, w = patch.grid
        return h * w // self.merge**2 * self.width * self.dtype.itemsize


class State(enum.Enum):
    """Where an entry is; see above."""

    QUEUED = enum.auto()
    LOADING = enum.auto()
    ENCODING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


@dataclass
class _Entry:
    """One key that somebody holds, or that is under way. order: of the oldest request that wanted it."""

    key: bytes
    patch: TemporalPatch
    order: int
    nbytes: int
    state: State = State.QUEUED
    attempts: int = 0
    not_on_disk: bool = False
    saved: bool | None = None
    error: str = ""


@dataclass
class _Worker:
    """alone: it retries one entry, and gets nothing else meanwhile."""

    batches: dict[int, list[_Entry]] = field(default_factory=dict)
    alone: bool = False

    @property
    def patches(self) -> int:
        return sum(entry.patch.num_patches for batch in self.batches.values() for entry in batch)


class EncoderPool:
    """See above. cache: where rows are kept; disk: behind it, if any. fingerprint: of tower, settings and dtype."""

    def __init__(
        self,
        backend: EncoderBackend,
        cache: EmbeddingCache,
        *,
        fingerprint: bytes,
        row_shape: RowShape,
        limits: PoolLimits,
        disk: DiskTier | None = None,
    ) -> None:
        self.cache = cache
        self._backend = backend
        self._fingerprint = fingerprint
        self._row_shape = row_shape
        self._limits = limits
        self._disk = disk
        self._entries: dict[bytes, _Entry] = {}
        self._workers: dict[int, _Worker] = {}
        self._batches = 0
        self._new_failures: dict[bytes, str] = {}
        self._counts = Counter[str]()

    # ------------------------------------------------------------ for those who need rows

    def key(self, patch: TemporalPatch) -> bytes:
        """What a temporal patch's rows are known by."""
        return patch.digest if patch.encoded else embedding_key(self._fingerprint, patch)

    def submit(self, patches: Sequence[TemporalPatch], *, order: int) -> list[bytes]:
        """Hold the rows of some temporal patches and see to it that they come; their keys. order: lower goes first."""
        keys = [self.key(patch) for patch in patches]
        for key, patch in zip(keys, patches, strict=True):
            self.cache.hold(key)
            entry = self._entries.get(key)
            if entry is None:
                self._entries[key] = self._new_entry(key, patch, order)
            else:
                entry.order = min(entry.order, order)
                self._counts["coalesced"] += entry.state not in (State.READY, State.FAILED)
                if entry.state is State.FAILED:
                    self._new_failures[key] = entry.error  # for the newcomer
        return keys

    def release(self, keys: Iterable[bytes]) -> None:
        """Give up what `submit` held, once for each time."""
        for key in keys:
            entry = self._entries[key]
            self.cache.let_go(key)
            if not self.cache.holders(key) and entry.state not in (State.LOADING, State.ENCODING):
                self._forget(entry)

    def is_ready(self, key: bytes) -> bool:
        """Whether the rows of a held key can be used."""
        return self._entries[key].state is State.READY

    def rows(self, key: bytes) -> torch.Tensor:
        """Rows [n, width] of a held key that is ready, on the cache's device."""
        return self.cache.rows(key)

    def take_failures(self) -> dict[bytes, str]:
        """Keys that have failed since the last call, and why. They stay failed for as long as somebody holds them."""
        failures, self._new_failures = self._new_failures, {}
        return failures

    # ------------------------------------------------------------ saving

    def save(self, keys: Iterable[bytes], *, pin: bool = False) -> None:
        """Have the rows of held keys that are ready on the disk, whatever waits to be written. Needs a disk tier."""
        assert self._disk is not None
        for key in keys:
            self._entries[key].saved = None
            self._disk.save(key, self.cache.rows(key), insist=True, pin=pin)

    def is_saved(self, key: bytes) -> bool | None:
        """Whether a held key's rows are known to be on the disk. None: that is not known yet, or nobody asked."""
        return self._entries[key].saved

    # ------------------------------------------------------------ work

    @property
    def inline(self) -> bool:
        """Whether `advance` itself encodes, and takes its time."""
        return not self._backend.wait_handles()

    @property
    def busy(self) -> bool:
        """Whether something is under way that `advance` will hear of."""
        on_disk = self._disk is not None and (self._disk.loading or self._disk.saving)
        return bool(on_disk) or any(worker.batches for worker in self._workers.values())

    def wait_handles(self) -> list[int]:
        """File descriptors that become readable when `advance` has something to do."""
        handles = list(self._backend.wait_handles())
        return handles if self._disk is None else [*handles, self._disk.wait_handle()]

    def advance(self, *, urgent: bytes | None = None) -> bool:
        """Take what has come and start what there is room for; whether anything changed. An inline backend encodes one
        batch here.

        urgent: a held key without whose rows no request gets on. It goes first, and finds room: rows that wait for
        younger requests are given up for it, and made again later.
        """
        changed = self._take_all()
        changed |= self._start(urgent)
        return self._take_all() or changed

    def close(self) -> None:
        """End the workers, and write what waits to be written."""
        self._backend.close()
        if self._disk is not None:
            self._disk.close()

    def stats(self) -> PoolStats:
        """Plain figures."""
        states = [entry.state for entry in self._entries.values()]
        return PoolStats(
            **self._counts,
            queued=states.count(State.QUEUED),
            under_way=states.count(State.LOADING) + states.count(State.ENCODING),
            device=self.cache.device.stats(),
            host=None if self.cache.host is None else self.cache.host.stats(),
            disk=None if self._disk is None else self._disk.stats(),
        )

    # ------------------------------------------------------------ what comes

    def _take_all(self) -> bool:
        done = self._disk.collect() if self._disk is not None else []
        for one in done:
            if isinstance(one, Loaded):
                self._take_loaded(one.key, one.rows)
            else:
                self._take_saved(one.key, one.ok)
        results = self._backend.collect()
        for result in results:
            self._take_result(result)
        return bool(done or results)

    def _take_loaded(self, key: bytes, rows: torch.Tensor | None) -> None:
        entry = self._entries[key]
        wanted = self._row_shape.nbytes(entry.patch)
        if rows is not None and rows.nbytes == wanted and rows.dtype == self._row_shape.dtype:
            entry.saved = True
            self._make_ready(entry, rows)
            return
        entry.state, entry.not_on_disk = State.QUEUED, True
        self._forget_if_free(entry)

    def _take_saved(self, key: bytes, ok: bool) -> None:
        self._counts["saved" if ok else "save_failures"] += 1
        entry = self._entries.get(key)
        if entry is not None:
            entry.saved = ok

    def _take_result(self, result: EncodeResult) -> None:
        worker = next(worker for worker in self._workers.values() if result.number in worker.batches)
        entries = worker.batches.pop(result.number)
        worker.alone = False
        if result.rows is None:
            self._take_failure(entries, result.error, result.untried)
            return
        for entry, rows in zip(entries, result.rows, strict=True):
            self._counts["encoded"] += 1
            self._counts["patches_encoded"] += entry.patch.num_patches
            if self._disk is not None:
                self._disk.save(entry.key, rows)
            self._make_ready(entry, rows)

    def _take_failure(self, entries: list[_Entry], error: str, untried: bool) -> None:
        for entry in entries:
            entry.attempts += not untried
            if entry.attempts < MAX_ATTEMPTS:
                self._counts["retried"] += 1
                entry.state = State.QUEUED
            else:
                self._fail(entry, error)
            self._forget_if_free(entry)
        log.warning("%d temporal patches could not be encoded: %s", len(entries), error)

    def _make_ready(self, entry: _Entry, rows: torch.Tensor) -> None:
        entry.state = State.READY
        self.cache.add(entry.key, rows)
        self._forget_if_free(entry)

    def _fail(self, entry: _Entry, error: str) -> None:
        self._counts["failed"] += 1
        entry.state, entry.error = State.FAILED, error
        self._new_failures[entry.key] = error

    # ------------------------------------------------------------ what starts

    def _start(self, urgent: bytes | None) -> bool:
        queued = (entry for entry in self._entries.values() if entry.state is State.QUEUED)
        queue = sorted(queued, key=lambda entry: (entry.key != urgent, entry.order))
        if not queue:
            return False
        usable = self._backend.workers()
        if not usable:
            for entry in queue:
                self._fail(entry, "no vision encoder worker is left")
            return True
        forced = queue[0].key == urgent
        if forced:
            self._make_room(queue[0])
        admitted = self._admit(queue, forced=forced)
        started = False
        to_encode = []
        for entry in admitted:
            if self._disk is not None and not entry.not_on_disk:
                entry.state, started = State.LOADING, True
                self._disk.load(entry.key)
            else:
                to_encode.append(entry)
        return self._start_batches(to_encode, usable) or started

    def _admit(self, queue: list[_Entry], *, forced: bool) -> list[_Entry]:
        """Those from the front of the queue that the space is enough for. forced: the first in any case."""
        held = self.cache.device.held_bytes
        under_way = [e.nbytes for e in self._entries.values() if e.state in (State.LOADING, State.ENCODING)]
        used = held + sum(under_way)
        admitted: list[_Entry] = []
        for entry in queue:
            alone = used == 0 or (forced and not admitted)
            if not alone and used + entry.nbytes > self._limits.space_bytes:
                break
            admitted.append(entry)
            used += entry.nbytes
        return admitted

    def _make_room(self, head: _Entry) -> None:
        """Drop rows that only younger requests wait for, youngest first, until `head` fits."""
        ready = (e for e in self._entries.values() if e.state is State.READY and not e.patch.encoded)
        younger = sorted((e for e in ready if e.order > head.order), key=lambda entry: -entry.order)
        for entry in younger:
            if self.cache.device.held_bytes + head.nbytes <= self._limits.space_bytes:
                break
            self.cache.drop(entry.key)
            entry.state = State.QUEUED

    def _start_batches(self, queue: list[_Entry], usable: Sequence[int]) -> bool:
        started = False
        waiting = list(queue)
        while waiting:
            ids = [number for number in usable if self._has_room(number, alone=waiting[0].attempts > 0)]
            if not ids:
                break
            number = min(ids, key=lambda number: (self._worker(number).patches, number))
            batch = self._next_batch(waiting, len(ids))
            worker = self._worker(number)
            worker.alone = batch[0].attempts > 0
            for entry in batch:
                entry.state = State.ENCODING
            self._batches += 1
            worker.batches[self._batches] = batch
            self._backend.start(
                number, EncodeBatch(number=self._batches, patches=tuple(entry.patch for entry in batch))
            )
            started = True
        return started

    def _next_batch(self, waiting: list[_Entry], workers: int) -> list[_Entry]:
        """Take the next batch from the front: an even share of what waits, within the compute budget."""
        total = sum(entry.patch.num_patches for entry in waiting)
        target = min(self._limits.max_patches, math.ceil(total / workers))
        batch = [waiting.pop(0)]
        patches = batch[0].patch.num_patches
        while waiting and not batch[0].attempts and not waiting[0].attempts:
            patches += waiting[0].patch.num_patches
            if patches > target:
                break
            batch.append(waiting.pop(0))
        return batch

    def _has_room(self, number: int, *, alone: bool) -> bool:
        worker = self._worker(number)
        return not worker.alone and len(worker.batches) < (1 if alone else self._limits.batches_ahead)

    def _worker(self, number: int) -> _Worker:
        return self._workers.setdefault(number, _Worker())

    # ------------------------------------------------------------ entries

    def _new_entry(self, key: bytes, patch: TemporalPatch, order: int) -> _Entry:
        entry = _Entry(key=key, patch=patch, order=order, nbytes=self._row_shape.nbytes(patch))
        if patch.encoded:
            # a copy, for the request's own array may be read-only memory
            self.cache.add(key, torch.tensor(patch.pixels))
            entry.state = State.READY
        elif self.cache.find(key) is not None:
            entry.state = State.READY
        return entry

    def _forget_if_free(self, entry: _Entry) -> None:
        """To be called when an entry is no longer under way."""
        if not self.cache.holders(entry.key):
            self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self._new_failures.pop(entry.key, None)
        if entry.patch.encoded and entry.key in self.cache.device:
            self.cache.device.pop(entry.key)  # from outside: not kept longer than it is used
