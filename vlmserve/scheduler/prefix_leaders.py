"""Requests that had better wait for another one's prefix than compute it beside that one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vlmserve.scheduler.req import Req


class PrefixLeaders:
    """Of one step: whose prefixes are being computed.

    Requests that share min_shared or more tokens (or a page, if larger) which are not cached yet, such as the `n`
    answers to one picture: the first leads, the others find its prefix in the cache some steps later. Pointless where
    prefixes are not cached.

    match: cached tokens of a waiting request. key_of: its prefix cache key, int64, as `match` looks it up.
    """

    def __init__(
        self,
        match: Callable[[Req], int],
        key_of: Callable[[Req], np.ndarray],
        *,
        page_size: int,
        min_shared: int = 32,
    ) -> None:
        self._match = match
        self._key_of = key_of
        self._page = page_size
        self._shared = max(min_shared, page_size)
        # Keys whose next uncached tokens are equal, from an equal offset on, are compared as a whole.
        self._leaders: dict[tuple[bytes, int, bytes], list[np.ndarray]] = {}

    def lead(self, req: Req) -> None:
        """A prompt that is being computed leads. What others find of it is what it has committed, in whole pages."""
        key = req.radix_key(min(req.fill_len, req.prompt_len))
        self._join(req.namespace, key, req.kv_committed_len // self._page * self._page)

    def must_wait(self, req: Req) -> bool:
        """Whether a waiting request follows another; if not, it leads from now on."""
        key, cached = self._key_of(req), self._match(req)
        return len(key) - cached >= self._shared and not self._join(req.namespace, key, cached)

    def _join(self, namespace: bytes, key: np.ndarray, cached: int) -> bool:
        group = self._leaders.setdefault((namespace, cached, key[cached : cached + self._shared].tobytes()), [])
        if any(np.array_equal(leader[:cached], key[:cached]) for leader in group):
            return False
        group.append(key)
        return True
