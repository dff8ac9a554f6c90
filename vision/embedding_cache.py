"""Embeddings of media already encoded, by content digest: a byte-limited LRU on the tower's device."""

from __future__ import annotations

from collections import OrderedDict

import torch


class EmbeddingCache:
    """digest -> rows [n, width]. Never holds more than `limit_bytes`; an entry larger than that is not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def get(self, digest: bytes) -> torch.Tensor | None:
        """The rows, now the most recently used; None if they are not here."""
        rows = self._entries.get(digest)
        if rows is not None:
            self._entries.move_to_end(digest)
        return rows

    def put(self, digest: bytes, rows: torch.Tensor) -> None:
        """Keep rows, evicting the least recently used until they fit."""
        if digest in self._entries or rows.nbytes > self.limit_bytes:
            return
        while self.bytes + rows.nbytes > self.limit_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.bytes -= evicted.nbytes
        self._entries[digest] = rows
        self.bytes += rows.nbytes

    def __len__(self) -> int:
        return len(self._entries)
