"""Caches processed pictures and videos by the content of their files, so that a repeated one is not decoded again."""

from __future__ import annotations

from collections import OrderedDict

from processors.families.base import ProcessedMedium
from processors.hashing import digest_fields
from processors.pool.maker import MediaWork


class ProcessorCache:
    """Evicts the least recently used medium first. `max_bytes` bounds the features held; 0 turns the cache off."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, ProcessedMedium] = OrderedDict()
        self._bytes = 0

    @staticmethod
    def key(work: MediaWork, tenant: str = "") -> bytes:
        """Return the key of files, knobs and tenant. Knobs are dataclasses: their repr holds their type and values."""
        files = [file for file in work.files if isinstance(file, bytes)]
        return digest_fields([bytes([work.listed]), repr(work.knobs).encode(), tenant.encode(), *files])

    def get(self, key: bytes) -> ProcessedMedium | None:
        """Return the medium under `key`, if it is still cached."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, medium: ProcessedMedium) -> None:
        """Keep `medium`, and evict the least recently used for it. A medium larger than the cache is not kept."""
        if medium.feature.nbytes > self._max_bytes:
            return
        old = self._entries.pop(key, None)
        if old is not None:
            self._bytes -= old.feature.nbytes
        self._entries[key] = medium
        self._bytes += medium.feature.nbytes
        while self._bytes > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._bytes -= evicted.feature.nbytes
