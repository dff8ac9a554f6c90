"""Processed pictures and videos by the content of their files, so that one sent again is not decoded again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from processors.families.base import ProcessedMedium
from processors.hashing import digest_fields
from processors.knobs import ImageKnobs
from processors.video.options import VideoKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStats:
    """Counts since the start, and what is held now."""

    hits: int
    misses: int
    entries: int
    bytes: int


class ProcessorCache:
    """Least recently used goes first. max_bytes bounds the features held; 0 turns the cache off."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, ProcessedMedium] = OrderedDict()
        self._bytes = 0
        self._hits = 0
        self._misses = 0

    @staticmethod
    def key(
        kind: Literal["picture", "clip", "frames"],
        files: Sequence[bytes],
        knobs: ImageKnobs | VideoKnobs,
        tenant: str = "",
    ) -> bytes:
        """The bytes of a file, or of a video's frames; what they are taken for, what is asked of it, and for whom.

        Knobs are dataclasses, whose repr has all that they say.
        """
        return digest_fields([kind.encode(), repr(knobs).encode(), tenant.encode(), *files])

    def get(self, key: bytes) -> ProcessedMedium | None:
        """What was put under `key`, if it is still there."""
        found = self._entries.get(key)
        if found is None:
            self._misses += 1
            return None
        self._entries.move_to_end(key)
        self._hits += 1
        return found

    def put(self, key: bytes, medium: ProcessedMedium) -> None:
        """Keep `medium`, at the expense of those not used for longest. One larger than the cache is not kept."""
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

    def stats(self) -> CacheStats:
        """A snapshot."""
        return CacheStats(hits=self._hits, misses=self._misses, entries=len(self._entries), bytes=self._bytes)
