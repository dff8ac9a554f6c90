"""The disk behind the memory tiers, read and written in threads, so that nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from vision.embedding_stats import TierStats


class Store(Protocol):
    """Rows on disk; see `vision.embedding_store.EmbeddingStore`. Thread-safe."""

    def get(self, key: bytes) -> torch.Tensor | None: ...

    def put(self, key: bytes, rows: torch.Tensor, *, pin: bool = False) -> bool: ...

    def tier_stats(self) -> TierStats: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """rows: on the CPU; None if the disk does not have them."""

    key: bytes
    rows: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """ok: the rows are on the disk and stay there through a crash."""

    key: bytes
    ok: bool


Done: TypeAlias = Loaded | Saved


class DiskTier:
    """Loads and saves beside the caller, who collects what is done. For one thread.

    backlog_bytes: rows that may wait to be written; above it, those that nobody insists on are not saved.
    """

    def __init__(self, store: Store, *, backlog_bytes: int = 256 * 2**20) -> None:
        self.store = store
        self._backlog_limit = backlog_bytes
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="embedding-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="embedding-writer")
        self._done: deque[Done] = deque()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self.loading = self.saving = 0
        self._wake_from, self._wake_to = os.pipe()
        os.set_blocking(self._wake_from, False)
        os.set_blocking(self._wake_to, False)

    def load(self, key: bytes) -> None:
        """Begin to read; a `Loaded` follows."""
        self.loading += 1
        self._readers.submit(self._load, key)

    def save(self, key: bytes, rows: torch.Tensor, *, insist: bool = False, pin: bool = False) -> None:
        """Begin to write rows from any device; a `Saved` follows. insist: whatever the backlog."""
        self.saving += 1
        with self._lock:
            full = self._waiting_bytes + rows.nbytes > self._backlog_limit
            if full and not insist:
                self._done.append(Saved(key=key, ok=False))
                return
            self._waiting_bytes += rows.nbytes
        self._writer.submit(self._save, key, rows.cpu(), pin)

    def collect(self) -> list[Done]:
        """What is done since."""
        try:
            while os.read(self._wake_from, 4096):
                pass
        except BlockingIOError:
            pass
        done = []
        while self._done:
            done.append(self._done.popleft())
        loads = sum(isinstance(one, Loaded) for one in done)
        self.loading -= loads
        self.saving -= len(done) - loads
        return done

    def wait_handle(self) -> int:
        """A file descriptor that becomes readable when something is done."""
        return self._wake_from

    def stats(self) -> TierStats:
        """Plain figures."""
        return self.store.tier_stats()

    def close(self) -> None:
        """Write what waits to be written, and end the threads."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        os.close(self._wake_from)
        os.close(self._wake_to)

    def _load(self, key: bytes) -> None:
        rows = None
        try:
            rows = self.store.get(key)
        finally:
            self._finish(Loaded(key=key, rows=rows))

    def _save(self, key: bytes, rows: torch.Tensor, pin: bool) -> None:
        ok = False
        try:
            ok = self.store.put(key, rows, pin=pin)
        finally:
            with self._lock:
                self._waiting_bytes -= rows.nbytes
            self._finish(Saved(key=key, ok=ok))

    def _finish(self, done: Done) -> None:
        self._done.append(done)
        with contextlib.suppress(BlockingIOError):  # full, and so readable as it is
            os.write(self._wake_to, b"!")
