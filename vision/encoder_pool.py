"""The path from temporal patches to their embeddings: finds, loads or encodes them, and decides the order.

Each temporal patch has an embedding key. A request holds the key (`submit`) until it has used the embeddings or given
them up (`release`). Identical content is found, loaded or encoded once for all requests that hold it. An entry's states
are

    QUEUED -> LOADING (from disk) -> WAITING (for a worker) -> ENCODING -> READY
       `-> READY (in memory)`-> READY   ^---- once more and alone ----'`-> FAILED

There are two budgets. A batch has at most `max_patches` patches (compute); one larger picture goes alone. All entries
that have left the queue take at most `space_bytes` together (space); one larger entry goes when nothing else is there.
Entries leave the queue in the order of their requests and their places in them. None overtakes an entry that has no
room. Entries that wait for younger requests make room for an older request's entry, so the oldest request always
proceeds. Not thread-safe, never blocks.
"""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from processors.hashing import digest_fields
from vision.batches import UNDER_WAY, Batches, EncodeEntry, EntryState, Order
from vision.cache.disk_tier import DiskTier, Loaded, Saved
from vision.cache.embedding_cache import EmbeddingCache
from vision.cache.stats import LinkStats, PoolStats
from vision.cache.store import EmbeddingStore
from vision.towers.temporal_patch import TemporalPatch, embedding_key
from vision.workers.backend import EncoderBackend, EncodeResult
from vlmserve_common.checkpoint.weight_source import WeightSource

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Budgets. `max_patches`: in a batch. `space_bytes`: held or under way. `batches_ahead`: given to a worker at a
    time."""

    max_patches: int
    space_bytes: int
    batches_ahead: int = 2


@dataclass(frozen=True, kw_only=True)
class EmbedShape:
    """The shape of a tower's embeddings. `merge`: patches a side that become one. `width`: elements of one, including
    DeepStack's. `main_width`: of these, the ones that stand for the token itself; they come first. 0: all of them."""

    merge: int
    width: int
    dtype: torch.dtype
    main_width: int = 0

    def of(self, patch: TemporalPatch) -> tuple[int, int]:
        """Return the shape [n, width] of a temporal patch's embeddings."""
        return patch.rows(self.merge), self.width

    def suits(self, patch: TemporalPatch) -> bool:
        """Return whether the tower can encode a grid, and what is kept of it."""
        h, w = patch.grid
        whole = min(h, w) >= 1 and not h % self.merge and not w % self.merge
        if not whole or not patch.kept:
            return whole
        return len(patch.kept) == h * w // self.merge**2 and set(patch.kept) in ({1}, {0, 1})

    def nbytes(self, patch: TemporalPatch) -> int:
        """Return the bytes of a temporal patch's embeddings."""
        return math.prod(self.of(patch)) * self.dtype.itemsize


class EncoderPool:
    """The encoder pool. `cache`, `disk`: where embeddings are kept. `fingerprint`: identifies tower, settings and
    dtype. `link_stats`: figures of the links to other servers, if there are any."""

    def __init__(
        self,
        backend: EncoderBackend,
        cache: EmbeddingCache,
        *,
        fingerprint: bytes,
        embed_shape: EmbedShape,
        limits: PoolLimits,
        disk: DiskTier | None = None,
        link_stats: Callable[[], LinkStats] | None = None,
    ) -> None:
        self.cache = cache
        self._backend = backend
        self.fingerprint = fingerprint
        self.embed_shape = embed_shape
        self._limits = limits
        self._disk = disk
        self._link_stats = link_stats
        self._entries: dict[bytes, EncodeEntry] = {}
        self._queue: list[tuple[Order, bytes]] = []  # sorted
        self._admitted: dict[bytes, EncodeEntry] = {}  # have room; the cache holds them
        self._used_bytes = 0  # by these
        self._batches = Batches(backend, max_patches=limits.max_patches, ahead=limits.batches_ahead)
        self._new_failures: dict[bytes, str] = {}
        self._counts = Counter[str]()

    # ------------------------------------------------------------ requests

    def key(self, patch: TemporalPatch) -> bytes:
        """Return the key of a temporal patch's embeddings."""
        return patch.digest if patch.encoded else embedding_key(self.fingerprint, patch)

    def submit(self, patches: Sequence[TemporalPatch], *, order: int, place: int = 0) -> list[bytes]:
        """Hold the embeddings of some temporal patches, so that `advance` gets them; return their keys.

        `order`: lower goes first. `place`: the first patch's place among all of the same order; the others follow it.
        """
        keys = [self.key(patch) for patch in patches]
        for number, (key, patch) in enumerate(zip(keys, patches, strict=True), place):
            entry = self._entries.get(key)
            if entry is not None:
                self._join(entry, (order, number))
                continue
            patch = patch.with_pixels()
            entry = EncodeEntry(key=key, patch=patch, nbytes=self.embed_shape.nbytes(patch), holders=[(order, number)])
            self._entries[key] = entry
            self._enqueue(entry)
        return keys

    def release(self, keys: Iterable[bytes], *, order: int, place: int = 0) -> None:
        """Give up keys that `submit` held, once for each time. `order`, `place`: as in that call."""
        for number, key in enumerate(keys, place):
            entry = self._entries[key]
            with self._reordered(entry):
                entry.holders.remove((order, number))
            if entry.state is EntryState.ENCODING and not entry.holders:
                self._batches.cancel_if_free(entry)
            self._forget_if_free(entry)

    def is_ready(self, key: bytes) -> bool:
        """Return True if the embeddings of a held key can be used, until the next `advance`."""
        return self._entries[key].state is EntryState.READY

    def was_encoded(self, key: bytes) -> bool:
        """Return True if the embeddings of a held key were computed while it was held, and not found."""
        return self._entries[key].encoded

    def embeds(self, key: bytes) -> torch.Tensor:
        """Return the embeddings [n, width] of a held key that is ready, on the cache's device."""
        return self.cache.embeds(key)

    def error(self, key: bytes) -> str:
        """Return why a held key has failed; "" if it has not."""
        return self._entries[key].error

    def take_failures(self) -> dict[bytes, str]:
        """Return the keys that have failed since the last call, with the reasons. A key stays failed while a request
        holds it."""
        failures, self._new_failures = self._new_failures, {}
        return failures

    # ------------------------------------------------------------ saving

    @property
    def store(self) -> EmbeddingStore | None:
        """The store on disk; None without a disk tier."""
        return None if self._disk is None else self._disk.store

    def save(self, key: bytes, *, pin: bool = False) -> None:
        """Write the ready embeddings of a held key to disk, whatever the backlog. Needs a disk tier.

        They must have been made here: embeddings that came from outside belong to their client.
        """
        assert not self._entries[key].patch.encoded, "embeddings that came from outside are not kept"
        self._save(self._entries[key], self.cache.embeds(key), insist=True, pin=pin)

    def is_saved(self, key: bytes) -> bool | None:
        """Return whether a held key's embeddings are on disk in the way of the last `save`. None: not known yet, or
        never asked."""
        return self._entries[key].saved

    def is_saving(self, key: bytes) -> bool:
        """Return True if a held key's embeddings are being written. New embeddings are, unless too many wait for the
        disk."""
        entry = self._entries[key]
        return entry.last_save is not None and entry.saved is None

    def _save(self, entry: EncodeEntry, embeds: torch.Tensor, *, insist: bool = False, pin: bool = False) -> None:
        assert self._disk is not None, "there is no disk tier"
        entry.saved = None
        entry.last_save = self._disk.save(entry.key, embeds, insist=insist, pin=pin)

    # ------------------------------------------------------------ work

    @property
    def inline(self) -> bool:
        """Whether encoding takes the time of the thread that calls `work`."""
        return not self._backend.wait_handles()

    @property
    def takes_turns(self) -> bool:
        """Whether nothing else is computed on the device during `work`."""
        return self._backend.takes_turns

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return self._backend.has_work

    def work(self, budget_s: float) -> bool:
        """Encode for about so many seconds, if this process does the encoding; return True if it did.

        `advance` takes the results. The device's thread can call this while another thread calls the rest.
        """
        return self._backend.work(budget_s)

    @property
    def working(self) -> bool:
        """Whether embeddings are under way."""
        return any(entry.state in UNDER_WAY for entry in self._admitted.values())

    @property
    def busy(self) -> bool:
        """Whether `advance` will get results: embeddings, or writes to the disk."""
        return self.working or (self._disk is not None and self._disk.saving > 0)

    def wait_handles(self) -> list[int]:
        """Return file descriptors that become readable when `advance` has something to do."""
        handles = list(self._backend.wait_handles())
        return handles if self._disk is None else [*handles, self._disk.wait_handle()]

    def advance(self, *, urgent: bytes | None = None) -> bool:
        """Take results and start new work if there is room; return True if anything changed.

        This is bookkeeping only: an inline backend encodes in `work`. `urgent`: a held key without which no request can
        proceed. It goes first, whether or not there is room.
        """
        changed = self._take_all()
        changed |= self._admit(urgent)
        changed |= self._start(urgent)
        return self._take_all() or changed

    def take_results(self) -> bool:
        """Take results, and start nothing; return True if there were any."""
        return self._take_all()

    def write_tower(self, source: WeightSource) -> None:
        """See `EncoderBackend.write_tower`."""
        self._backend.write_tower(source)

    def change_tower(self, salt: bytes) -> None:
        """Give embeddings other keys from now on, when nothing is under way. Holders must give up their keys, and
        submit their patches again."""
        assert not self.working
        self.fingerprint = digest_fields([self.fingerprint, salt])

    def flush(self, timeout_s: float) -> int:
        """See `DiskTier.flush`. Without a disk, nothing waits."""
        return 0 if self._disk is None else self._disk.flush(timeout_s)

    def close(self) -> None:
        """End the workers, and write the disk's backlog."""
        self._backend.close()
        if self._disk is not None:
            self._disk.close()

    def stats(self) -> PoolStats:
        states = Counter(entry.state for entry in self._entries.values())
        return PoolStats(
            **self._counts,
            queued=states[EntryState.QUEUED] + states[EntryState.WAITING],
            under_way=sum(states[state] for state in UNDER_WAY),
            device=self.cache.device.stats(),
            host=None if self.cache.host is None else self.cache.host.stats(),
            disk=None if self._disk is None else self._disk.stats(),
            link=None if self._link_stats is None else self._link_stats(),
        )

    # ------------------------------------------------------------ what comes

    def _take_all(self) -> bool:
        done = self._disk.collect() if self._disk is not None else []
        for one in done:
            if isinstance(one, Loaded):
                self._take_loaded(self._entries[one.key], one.embeds)
            else:
                self._take_saved(one)
        results = self._backend.collect()
        for result in results:
            self._take_result(result)
        return bool(done or results)

    def _take_loaded(self, entry: EncodeEntry, embeds: torch.Tensor | None) -> None:
        shape = self.embed_shape
        if embeds is not None and embeds.shape == shape.of(entry.patch) and embeds.dtype == shape.dtype:
            entry.saved = True
            self._make_ready(entry, embeds)
        else:
            entry.state = EntryState.WAITING
            self._forget_if_free(entry)

    def _take_saved(self, done: Saved) -> None:
        self._counts["saved"] += done.new
        self._counts["save_failures"] += not done.ok
        entry = self._entries.get(done.key)
        if entry is not None and entry.last_save == done.number:
            entry.saved = done.ok

    def _take_result(self, result: EncodeResult) -> None:
        entries = self._batches.take(result.number)
        if result.embeds is None:
            self._take_failure(entries, result.error, result.untried)
            return
        for entry, embeds in zip(entries, result.embeds, strict=True):
            self._counts["encoded"] += 1
            self._counts["patches_encoded"] += entry.patch.num_patches
            entry.encoded = True
            if self._disk is not None:
                self._save(entry, embeds)
            self._make_ready(entry, embeds)

    def _take_failure(self, entries: list[EncodeEntry], error: str, untried: bool) -> None:
        if any(entry.holders for entry in entries):
            log.warning("%d temporal patches could not be encoded: %s", len(entries), error)
        for entry in entries:
            entry.attempts += not untried
            if entry.attempts < MAX_ATTEMPTS:
                self._counts["retried"] += bool(entry.holders)
                entry.state = EntryState.WAITING
                self._forget_if_free(entry)
            else:
                self._fail(entry, error)

    def _make_ready(self, entry: EncodeEntry, embeds: torch.Tensor) -> None:
        entry.state = EntryState.READY
        self.cache.add(entry.key, embeds)
        self._forget_if_free(entry)

    def _fail(self, entry: EncodeEntry, error: str) -> None:
        self._counts["failed"] += 1
        self._give_back_room(entry)
        entry.state, entry.error = EntryState.FAILED, error
        self._new_failures[entry.key] = error
        self._forget_if_free(entry)

    # ------------------------------------------------------------ room

    def _admit(self, urgent: bytes | None) -> bool:
        """Begin with the first entries of the queue, while there is room."""
        admitted = False
        if urgent is not None and self._entries[urgent].state is EntryState.QUEUED:
            self._make_room(self._entries[urgent])
            self._begin(self._entries[urgent])
            admitted = True
        while self._queue:
            first = self._entries[self._queue[0][1]]
            if not self._make_room(first):
                break
            self._begin(first)
            admitted = True
        return admitted

    def _make_room(self, entry: EncodeEntry) -> bool:
        """Return True if there is room for an entry.

        If needed, ready and waiting entries of younger requests give up theirs, the youngest first. They keep it if
        even that is not enough.
        """
        used, space = self._used_bytes, self._limits.space_bytes
        if not used or used + entry.nbytes <= space:
            return True
        younger = sorted(
            (other for other in self._admitted.values() if other.state not in UNDER_WAY and other.order > entry.order),
            key=lambda other: other.order,
        )
        leaving = []
        while used and used + entry.nbytes > space:
            if not younger:
                return False
            leaving.append(younger.pop())
            used -= leaving[-1].nbytes
        for other in leaving:
            self._give_back_room(other)
            self._enqueue(other)
        return True

    def _begin(self, entry: EncodeEntry) -> None:
        self._dequeue(entry)
        self._admitted[entry.key] = entry
        self._used_bytes += entry.nbytes
        self.cache.hold(entry.key)
        if entry.patch.encoded:
            # a copy, for the request's own array may be read-only memory; without what a second tower would make
            rows = torch.tensor(entry.patch.pixels, dtype=self.embed_shape.dtype)
            self.cache.add(entry.key, pad(rows, (0, self.embed_shape.width - rows.shape[1])))
            entry.state = EntryState.READY
        elif self.cache.find(entry.key):
            entry.state = EntryState.READY
        elif self._disk is not None:
            entry.state = EntryState.LOADING
            self._disk.load(entry.key)
        else:
            entry.state = EntryState.WAITING

    def _give_back_room(self, entry: EncodeEntry) -> None:
        del self._admitted[entry.key]
        self._used_bytes -= entry.nbytes
        if entry.patch.encoded:
            self.cache.drop(entry.key)  # from outside: not kept longer than it is used
        else:
            self.cache.let_go(entry.key)

    # ------------------------------------------------------------ batches

    def _start(self, urgent: bytes | None) -> bool:
        waiting = [entry for entry in self._admitted.values() if entry.state is EntryState.WAITING]
        if not waiting:
            return False
        if not self._backend.workers():
            for entry in waiting:
                self._fail(entry, "no vision encoder worker is left")
            return True
        waiting.sort(key=lambda entry: (entry.key != urgent, entry.order))
        return self._batches.start(waiting)

    # ------------------------------------------------------------ entries

    def _enqueue(self, entry: EncodeEntry) -> None:
        entry.state = EntryState.QUEUED
        insort(self._queue, (entry.order, entry.key))

    def _dequeue(self, entry: EncodeEntry) -> None:
        del self._queue[bisect_left(self._queue, (entry.order, entry.key))]

    def _join(self, entry: EncodeEntry, order: Order) -> None:
        self._counts["coalesced"] += entry.state not in (EntryState.READY, EntryState.FAILED)
        if entry.state is EntryState.FAILED:
            self._new_failures[entry.key] = entry.error  # for the newcomer
        with self._reordered(entry):
            insort(entry.holders, order)

    @contextlib.contextmanager
    def _reordered(self, entry: EncodeEntry) -> Iterator[None]:
        """Take an entry out of the queue while its holders change."""
        queued = entry.state is EntryState.QUEUED
        if queued:
            self._dequeue(entry)
        yield
        if queued and entry.holders:
            self._enqueue(entry)

    def _forget_if_free(self, entry: EncodeEntry) -> None:
        """Forget an entry that has no holder and is not under way."""
        if entry.holders or entry.state in UNDER_WAY:
            return
        if entry.key in self._admitted:
            self._give_back_room(entry)
        del self._entries[entry.key]
        self._new_failures.pop(entry.key, None)
