"""Keeps the entries of a whole folder under one limit, whoever writes them."""

from __future__ import annotations

import time
from collections.abc import Callable

from vision.cache.folder import EmbeddingFolder, StoredEntry, least_recently_used

_REFUSE_FOR_S = 10.0  # a look at the whole folder for every refused entry would be too much


class FolderLimit:
    """One process's view. It counts what it writes and looks at the folder again before that is a sixteenth of the
    limit, which bounds what several processes exceed it by. Used by one thread at a time.

    bytes, entries: what the folder held at the last look, with what was written since; evictions: in all.
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
        """Evict what was not used for longest until `need` bytes fit; False if pinned entries are in the way. OSError.

        Evicting goes on to nine tenths of the limit, so as not to begin anew with every entry.
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
        """An entry of so many bytes is new."""
        self.entries += 1
        self.bytes += size
        self._room -= size

    def look(self) -> list[StoredEntry]:
        """All entries. Raises OSError."""
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
