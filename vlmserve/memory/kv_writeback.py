"""Writes the tiers of a prefix cache to disk at the end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.kv_transfer import STAGED_BYTES, KVCopyJob, KVTransfer


class KVWriteback:
    """storage: of `cache` and `transfer`. clock: seconds."""

    def __init__(
        self,
        cache: HiRadixCache,
        transfer: KVTransfer,
        storage: KVStorage,
        *,
        bytes_per_token: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._transfer = transfer
        self._storage = storage
        self._width = bytes_per_token
        self._clock = clock

    def close(self, timeout_s: float | None = None) -> int:
        """Write all prefixes that no disk has, as far as the disk has room, for so many seconds at most (None: no
        limit), and end the storage's threads. Call it last, when no step is in flight. Return how many tokens of cached
        prefixes there was no time for: those that were used the longest ago.

        It writes one piece at a time, because a waiting piece lies in memory a second time.
        """
        deadline = math.inf if timeout_s is None else self._clock() + timeout_s
        self._transfer.run(self._cache.take_copy_jobs())
        jobs, last = self._jobs(), 0
        while jobs and self._storage.flush(self._left(deadline)):
            job = jobs.popleft()
            self._transfer.run([job])
            last = self._tokens(job)
        written = self._storage.close(self._left(deadline))
        return sum(map(self._tokens, jobs)) + (0 if written else last)

    def _left(self, deadline: float) -> float | None:
        return None if deadline == math.inf else deadline - self._clock()

    def _jobs(self) -> deque[KVCopyJob]:
        jobs: deque[KVCopyJob] = deque()
        room = self._storage.limit_bytes
        for job in self._cache.unstored(STAGED_BYTES // self._width):
            room -= self._storage.file_bytes(len(job.pages))
            if room < 0:
                break
            jobs.append(job)
        return jobs

    def _tokens(self, job: KVCopyJob) -> int:
        return len(job.pages) * self._cache.page_size
