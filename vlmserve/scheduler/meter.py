"""What the scheduler has counted, so that it does not count itself: steps, prefix hits, who waits for the encoder."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from vlmserve.ipc.messages import HistogramStats, StepStats
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.schedule_batch import ScheduleBatch

_REQS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Histogram:
    """Counts values by upper bounds, as Prometheus does: a value that is a bound belongs to it."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0

    def add(self, value: int) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def stats(self) -> HistogramStats:
        """Plain figures."""
        return HistogramStats(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)


class SchedulerMeter:
    """One call at each event of a scheduler. Keeps its requests' `ReqTimes`, too."""

    def __init__(self) -> None:
        self._step_reqs, self._step_tokens = Histogram(_REQS), Histogram(_TOKENS)
        self._prompt_tokens = self._queries = self._hits = self._preempted = 0
        self._drafted = self._accepted = 0
        self._encoding: list[Req] = []

    def arrived(self, req: Req) -> None:
        """It is on the waiting queue, and holds what it needs of the encoder."""
        encodes = req.media.needs_embeds(0, req.prompt_len)
        req.times.arrived(encodes=encodes)
        if encodes and req.media.first_unready() is None:
            req.times.encoded(cached=True)
        elif encodes:
            self._encoding.append(req)

    def encoder_moved(self) -> None:
        """The encoder has got on: see whose embeddings are there."""
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
        """A step is about to be launched."""
        self._step_reqs.add(len(batch))
        self._step_tokens.add(batch.num_tokens)
        self._prompt_tokens += batch.prompt_tokens
        for part in batch.prompts:
            part.req.times.prefill_began()

    def first_token(self, req: Req) -> None:
        """Its prompt is computed."""
        req.times.first_token()
        self._queries += req.prompt_len
        self._hits += req.cached_tokens

    def drafted(self, count: int, wrong: int) -> None:
        """So many guessed tokens were checked, of which so many were wrong."""
        self._drafted += count
        self._accepted += count - wrong

    def preempted(self, req: Req) -> None:
        """Its KV slots were taken back, and it waits again."""
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
            draft_tokens_total=self._drafted,
            accepted_tokens_total=self._accepted,
            step_reqs=self._step_reqs.stats(),
            step_tokens=self._step_tokens.stats(),
        )
