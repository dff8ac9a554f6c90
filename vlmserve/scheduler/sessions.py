"""Conversations whose KV is kept between turns.

A prefix that nobody uses is the first to go when slots are short. A session holds on to the KV of its last turn, so
that the next one finds it, until slots are needed that nothing else can give, the session has been idle for too long,
or there are too many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vlmserve.memory.prefix_cache import PrefixCache
from vlmserve.memory.radix_tree import RadixNode


@dataclass(frozen=True, slots=True)
class _Session:
    node: RadixNode
    used_at: float


class Sessions:
    """Least recently used first. timeout_s: how long an idle one is kept. clock: seconds."""

    def __init__(
        self, prefix_cache: PrefixCache, *, max_sessions: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._cache = prefix_cache
        self._max = max_sessions
        self._timeout_s = timeout_s
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, name: str, key: np.ndarray, namespace: bytes = b"") -> None:
        """A turn has ended: keep what is cached of this prefix cache key, and let go of what the turn before left."""
        if not self._max or not self._cache.shares:
            return
        match = self._cache.match_prefix(key, namespace, count_hit=False)
        before = self._sessions.pop(name, None)
        if len(match.indices):
            self._cache.inc_lock_ref(match.last_node)
            self._sessions[name] = _Session(match.last_node, self._clock())
        if before is not None:
            self._cache.dec_lock_ref(before.node)
        if len(self._sessions) > self._max:
            self.release_oldest()

    def expire(self) -> None:
        """Let go of those that have been idle for too long."""
        if not self._sessions:
            return
        limit = self._clock() - self._timeout_s
        while self._sessions and next(iter(self._sessions.values())).used_at < limit:
            self.release_oldest()

    def release_oldest(self) -> bool:
        """Let one go; whether there was one."""
        if not self._sessions:
            return False
        session = self._sessions.pop(next(iter(self._sessions)))
        self._cache.dec_lock_ref(session.node)
        return True

    def release_all(self) -> None:
        """Let all go."""
        while self.release_oldest():
            pass
