"""The figures of a scheduler: counts of its events, lines in the log, and the check that nothing is lost."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from vlmserve.ipc.messages import Guesses, HistogramStats, SchedulerStats, StepStats
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.schedule_batch import ScheduleBatch
from vlmserve_common.errors import EngineError

log = logging.getLogger(__name__)

_REQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Histogram:
    """Counts values by upper bounds, as Prometheus does: a value that is a bound belongs to it."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0

    def add(self, value: int) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def stats(self) -> HistogramStats:
        """Plain figures."""
        return HistogramStats(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)


class SchedulerMeter:
    """Counts the events of a scheduler, one call for each. Keeps its requests' `ReqTimes`, too."""

    def __init__(self) -> None:
        self._step_reqs, self._step_tokens = Histogram(_REQS), Histogram(_TOKENS)
        self._prompt_tokens = self._queries = self._hits = self._preempted = 0
        self._guesses = Guesses()
        self._encode_s = self._prefill_s = self._decode_s = 0.0
        self._decode_steps = self._decode_tokens = 0
        self._encoding: list[Req] = []

    def arrived(self, req: Req) -> None:
        """Note a request that is on the waiting queue, and holds the embeddings that it needs."""
        encodes = req.media.needs_embeds(0, req.prompt_len)
        req.times.arrived(encodes=encodes)
        if encodes and req.media.first_unready() is None:
            req.times.encoded(cached=True)
        elif encodes:
            self._encoding.append(req)

    def encoder_moved(self) -> None:
        """Note that the encoder has brought something: find requests whose embeddings are there."""
        waiting = []
        for req in self._encoding:
            if req.finish_reason is not None:
                continue
            if req.media.first_unready() is None:
                req.times.encoded(cached=not req.media.was_encoded())
            else:
                waiting.append(req)
        self._encoding = waiting

    def step(self, batch: ScheduleBatch) -> None:
        """Note a step that is about to be launched."""
        self._step_reqs.add(len(batch))
        self._step_tokens.add(batch.num_tokens)
        self._prompt_tokens += batch.prompt_tokens
        for part in batch.prompts:
            part.req.times.prefill_began()

    def computed(self, prefill_s: float, decode_s: float, *, decoding: int) -> None:
        """Note what a step took for its prompts, and for the requests that decode, and how many these are."""
        self._prefill_s += prefill_s
        self._decode_s += decode_s
        self._decode_steps += decoding > 0
        self._decode_tokens += decoding

    def encoded(self, seconds: float) -> None:
        """Note what a slice of encoding took."""
        self._encode_s += seconds

    def first_token(self, req: Req) -> None:
        """Note that a request's prompt is computed."""
        req.times.first_token()
        self._queries += req.prompt_len
        self._hits += req.cached_tokens

    def checked(self, guesses: Guesses) -> None:
        """Note a step's guesses for a request."""
        self._guesses = self._guesses.plus(guesses)

    def preempted(self, req: Req) -> None:
        """Note that a request's KV slots were taken back, and it waits again."""
        req.times.retracted()
        self._preempted += 1

    def stats(self) -> StepStats:
        """Plain figures."""
        return StepStats(
            encoding_reqs=sum(req.finish_reason is None for req in self._encoding),
            preempted_total=self._preempted,
            prompt_tokens_computed_total=self._prompt_tokens,
            prefix_queries_total=self._queries,
            prefix_hits_total=self._hits,
            guesses=self._guesses,
            encode_seconds_total=self._encode_s,
            prefill_seconds_total=self._prefill_s,
            decode_seconds_total=self._decode_s,
            decode_steps_total=self._decode_steps,
            decode_reqs_total=self._decode_tokens,
            step_reqs=self._step_reqs.stats(),
            step_tokens=self._step_tokens.stats(),
        )


class BatchLog:
    """Writes a line about the engine's work every so often. Call `step` after each turn of the loop.

    Time without requests does not count, neither for the interval nor for rates, and an idle server writes nothing.
    Figures are gathered only when a line is due.

    interval_s: seconds of work between two lines; 0 for none. clock: in seconds.
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
        """Note the end of a turn. idle: there is no request left."""
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
    """Return the line. before: figures of the last line; None: from the start. seconds: of work since then."""
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
    if retracted:
        parts.append(f"{retracted} retracted")
    guesses = now.steps.guesses if before is None else now.steps.guesses.plus(before.steps.guesses, -1)
    if guesses.steps:
        parts.append(str(guesses))
    return ", ".join(parts)


def check_pools(
    stats: SchedulerStats, *, held_bytes: int, sessions: int, held_states: int = 0, held_windows: int = 0
) -> None:
    """Check an idle scheduler for lost memory: free + cached = total, for KV slots, the request pool and states of
    recurrent layers, and no embeddings are held. Raises EngineError.

    sessions: conversations that keep KV. held_states: states that are neither free nor cached. held_windows: the
    same for slots of layers with windows.
    """
    problems = []
    if stats.kv_locked_tokens and not sessions:
        problems.append(f"{stats.kv_locked_tokens} KV slots are locked")
    free, total = stats.kv_free_tokens, stats.kv_total_tokens
    cached = stats.kv_cached_tokens + stats.kv_locked_tokens
    if free + cached != total:
        problems.append(f"{free} free + {cached} cached KV slots are not {total}")
    if stats.req_pool_free != stats.req_pool_total:
        problems.append(f"{stats.req_pool_free} of {stats.req_pool_total} places in the request pool are free")
    if held_states:
        problems.append(f"{held_states} states of recurrent layers are neither free nor cached")
    if held_windows and not sessions:
        problems.append(f"{held_windows} slots of layers with windows are neither free nor cached")
    if held_bytes:
        problems.append(f"{held_bytes} bytes of embeddings are held")
    if problems:
        raise EngineError("idle, but " + "; ".join(problems))
