"""One line in the log for every so many seconds of work: how much is running, waiting and being made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vlmserve.ipc.messages import SchedulerStats

log = logging.getLogger(__name__)


class BatchLog:
    """Call `step` after each turn of the loop. interval_s: seconds of work between two lines; 0 for none.

    Time without requests does not count, neither for the interval nor for rates: these say what the engine makes while
    it is at it, and an idle server says nothing. Figures are gathered only when a line is due. clock: in seconds.
    """

    def __init__(
        self,
        interval_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = log.info,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._write = write
        self._since: float | None = None  # when this stretch of work began, or was last looked at
        self._worked_s = 0.0
        self._before: SchedulerStats | None = None

    def step(self, stats: Callable[[], SchedulerStats], *, idle: bool) -> None:
        """A turn is over. idle: there is no request left."""
        if not self._interval_s:
            return
        now = self._clock()
        if self._since is not None:
            self._worked_s += now - self._since
        elif self._before is None:
            self._before = stats()
        self._since = None if idle else now
        if self._worked_s >= self._interval_s:
            after = stats()
            self._write(describe(self._before, after, self._worked_s))
            self._before, self._worked_s = after, 0.0


def describe(before: SchedulerStats | None, now: SchedulerStats, seconds: float) -> str:
    """The line. before: as of the last one; None: from the start. seconds: of work since then."""
    used = now.kv_total_tokens - now.kv_free_tokens - now.kv_cached_tokens

    def since(figure: Callable[[SchedulerStats], int]) -> int:
        return figure(now) - (0 if before is None else figure(before))

    queries = since(lambda stats: stats.steps.prefix_queries_total)
    hits = since(lambda stats: stats.steps.prefix_hits_total)
    retracted = since(lambda stats: stats.steps.preempted_total)
    parts = [
        f"{now.num_running_reqs} running",
        f"{now.num_waiting_reqs} queued",
        f"{now.steps.encoding_reqs} waiting for the encoder",
        f"KV {used / max(1, now.kv_total_tokens):.0%}",
        f"prefix hits {hits / queries:.0%}" if queries else "prefix hits -",
        f"{since(lambda stats: stats.steps.prompt_tokens_computed_total) / seconds:.1f} prompt tokens/s",
        f"{since(lambda stats: stats.generation_tokens_total) / seconds:.1f} tokens/s",
        f"{since(lambda stats: stats.encoder.encoded)} pictures encoded",
    ]
    return ", ".join(parts) + (f", {retracted} retracted" if retracted else "")
