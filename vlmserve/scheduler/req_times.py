"""Where a request's time goes between its arrival at the scheduler and its last token.

    arrived     embeddings ready     first chunk     first token          last token
    |<-- encode ------>|<-- queue -->|<-- prefill -->|<-- decode ---------->|

Encoding and waiting overlap, so what counts as queue is the wait once nothing but the scheduler is waited for. A long
prompt may begin before its last picture is ready: encode and prefill overlap then, and there is no queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vlmserve.ipc.messages import StageTimes


class ReqTimes:
    """Takes a request's events as they happen; each costs a look at the clock. clock: seconds, never backwards."""

    __slots__ = ("_arrived", "_began", "_cached", "_clock", "_encoded", "_encodes", "_first", "_retractions")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived = clock()
        self._encodes = False
        self._encoded: float | None = None
        self._cached = False
        self._began: float | None = None
        self._first: float | None = None
        self._retractions = 0

    def arrived(self, *, encodes: bool) -> None:
        """It came. encodes: it needs embeddings that no prefix has made unnecessary."""
        self._arrived = self._clock()
        self._encodes = encodes

    def encoded(self, *, cached: bool) -> None:
        """All embeddings that it needs are there. cached: none of them had to be computed for it."""
        if self._encoded is None:
            self._encoded, self._cached = self._clock(), cached

    def prefill_began(self) -> None:
        """A chunk of its prompt goes into a step; the first one counts."""
        if self._began is None:
            self._began = self._clock()

    def first_token(self) -> None:
        """Its prompt is done. Once only: a prompt computed again gives no first token."""
        if self._first is None:
            self._first = self._clock()

    def retracted(self) -> None:
        """Its KV slots were taken back. The wait for others, and computing them again, count where it was."""
        self._retractions += 1

    def so_far(self) -> StageTimes:
        """The stages that it has come to, the last of them until now; all of them once it has its last token."""
        now = self._clock()
        encoded = (now if self._encoded is None else self._encoded) if self._encodes else self._arrived
        began = now if self._began is None else self._began
        first = now if self._first is None else self._first
        return StageTimes(
            queue_s=max(0.0, began - encoded),
            encode_s=encoded - self._arrived if self._encodes else None,
            encode_cached=self._cached if self._encodes else None,
            prefill_s=None if self._began is None else first - began,
            decode_s=None if self._first is None else now - first,
            total_s=now - self._arrived,
            retractions=self._retractions,
        )
