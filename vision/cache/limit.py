"""Keeps all entries of a folder under one limit, whichever process writes them."""

from __future__ import annotations

import time
from collections.abc import Callable

from vision.cache.folder import EmbeddingFolder, StoredEntry, least_recently_used

_REFUSE_FOR_S = 10.0  # a look at the whole folder for every refused entry would be too much


class FolderLimit:
    """One process's view of the limit. One thread at a time may use it.

    It counts its own writes, and lists the folder again before they reach a sixteenth of the limit. That bounds how far
    several processes exceed the limit. `bytes`, `entries`: at the last listing, plus own writes since. `evictions`: in
    all.
    """

    def __init__(self, folder: EmbeddingFolder, limit_bytes: int, clock: Callable[[], float]) -> None:
        self.bytes = 0
        self.entries = 0
        self.evictions = 0
        self._folder = folder
        self._limit = limit_bytes
        self._clock = clock
        self._room = 0
        self._refuse_until = 0.0  # monotonic seconds

    def make_room(self, need: int) -> bool:
        """Evict the entries unused for longest until `need` bytes fit. False if pinned entries leave too little. Raises
        OSError.

        Eviction continues to nine tenths of the limit, so that the next entries need none.
        """
        if 0 < need <= self._room:
            return True
        if time.monotonic() < self._refuse_until:
            return False
        self.look()
        if self.bytes + need > self._limit:
            with self._folder.locked(wait=False) as held:
                if not held:
                    return True  # another process makes room at this moment
                self._evict(need)
        self._room = min(self._limit - self.bytes, self._limit // 16)
        if self.bytes + need > self._limit:
            self._refuse_until = time.monotonic() + _REFUSE_FOR_S
            return False
        return True

    def wrote(self, size: int) -> None:
        """Count a new entry of so many bytes."""
        self.entries += 1
        self.bytes += size
        self._room -= size

    def look(self) -> list[StoredEntry]:
        """List all entries. Raises OSError."""
        entries = list(self._folder.entries(now_s=self._clock()))
        self.entries = len(entries)
        self.bytes = _sum(entries)
        return entries

    def _evict(self, need: int) -> None:
        self._folder.sweep(now_s=self._clock())
        loose = [entry for entry in self.look() if not entry.pinned]
        total = self.bytes + need
        if total - _sum(loose) <= self._limit < total:
            chosen = least_recently_used(loose, total - self._limit * 9 // 10)
            self.evictions += len(self._folder.evict(chosen))
            self.entries -= len(chosen)
            self.bytes -= _sum(chosen)


def _sum(entries: list[StoredEntry]) -> int:
    return sum(entry.bytes for entry in entries)
