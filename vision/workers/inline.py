"""Encodes batches in this process, piece by piece between the device's other work.

There are two threads, which may be the same: the scheduler's gives batches and takes results, the device's computes.
They share two deques and two counters, each written by one of them. All other state belongs to the device's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vision.towers.pieces import Kind, Piece, Steps
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncodeResult, attempt
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.compute.lanes import Lane
from vlmserve_common.compute.transfers import Mark

# Before anything was measured: a slow machine, so that the first pieces are not too long on any.
_GUESSED_S = {Kind.PRODUCT: 1 / 100e9, Kind.ATTENTION: 1 / 100e9, Kind.ELEMENTS: 1 / 400e6}
# The part of earlier measurements kept with each new piece: about the last fifty count.
_KEPT = 0.98


PIECE_S = 0.01
"""Target seconds of a piece."""
# ... where `work` has more time: that part of it, and so many at the most.
_PIECE_SHARE, _LONGEST_PIECE_S = 0.25, 0.1
BATCHES_IN_WORK = 3
_NAP_S = 50e-6
# While a later batch goes before it, the first one gets one second of so many.
_FIRST_SHARE = 4


class Pace:
    """Seconds per cost of each kind of piece, as a running mean. `most` is a `PieceLimits`: pieces take `piece_s`
    seconds.

    One thread reports times; any thread can ask.
    """

    def __init__(self, piece_s: float) -> None:
        self.piece_s = piece_s
        self._sums: dict[Kind, tuple[float, float]] = {}  # kind -> cost, seconds

    def took(self, piece: Piece, seconds: float) -> None:
        cost, spent = self._sums.get(piece.kind, (0.0, 0.0))
        self._sums[piece.kind] = (cost * _KEPT + piece.cost, spent * _KEPT + seconds)

    def seconds(self, kind: Kind, cost: float) -> float:
        """Estimate the seconds of pieces of that cost together; a guess before the first of their kind."""
        measured, spent = self._sums.get(kind, (0.0, 0.0))
        return cost * (spent / measured if measured and spent else _GUESSED_S[kind])

    def most(self, kind: Kind) -> float:
        return self.piece_s / self.seconds(kind, 1.0)


@dataclass(frozen=True, slots=True)
class _Cancel:
    number: int


@dataclass(kw_only=True, eq=False)
class _Job:
    """A batch in work. `next`: its next piece. `left`: the approximate cost of the rest."""

    number: int
    steps: Steps[tuple[torch.Tensor, ...]]
    next: Piece
    left: dict[Kind, float] = field(default_factory=dict)


class InlineBackend:
    """An `EncoderBackend` with one worker, number 0: the thread that calls `work`.

    Batches in work take turns, so that a small picture need not wait for all of a large one. The batch with the least
    work left goes first, but the one that was started first gets at least a quarter of the time. On a GPU pieces are
    launched in a lane of their own, beside the LLM's steps, and are short: only launching counts. A batch has its
    result when the GPU has computed it, and until then there is work.

    `piece_s`: target seconds of a piece, unless there is plenty of time. `most_batches`: in work at a time, which
    bounds the memory of unfinished batches. `lane`: where pieces are computed. `clock`: in seconds.
    """

    def __init__(
        self,
        runner: TowerRunner,
        *,
        piece_s: float = PIECE_S,
        most_batches: int = BATCHES_IN_WORK,
        lane: Lane | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._most_batches = most_batches
        self._lane = lane or Lane()
        self.takes_turns = not self._lane.beside
        self._clock = clock
        self._piece_s = piece_s
        self._pace = Pace(piece_s)
        self._inbox: deque[EncodeBatch | _Cancel] = deque()
        self._results: deque[EncodeResult] = deque()
        self._given = 0  # by the scheduler's thread: batches started
        self._ended = 0  # by the device's: ... that have their results
        self._waiting: deque[EncodeBatch] = deque()
        self._jobs: list[_Job] = []  # in the order in which they were started
        self._owed_s = 0.0  # to the first of them
        self._launched: deque[tuple[Mark, EncodeResult]] = deque()  # and not known to be computed yet

    # ------------------------------------------------------------ the scheduler's thread

    def workers(self) -> Sequence[int]:
        return (0,)

    def start(self, worker: int, batch: EncodeBatch) -> None:
        self._given += 1
        self._inbox.append(batch)

    def cancel(self, worker: int, number: int) -> None:
        self._inbox.append(_Cancel(number))

    def collect(self) -> list[EncodeResult]:
        return [self._results.popleft() for _ in range(len(self._results))]

    def write_tower(self, source: WeightSource) -> None:
        """Do nothing: the tower is in this process, and has other weights already."""

    def wait_handles(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        """Forget all batches. `work` must not be called afterwards."""
        for forgotten in (self._inbox, self._results, self._waiting, self._jobs, self._launched):
            forgotten.clear()
        self._ended = self._given

    # ------------------------------------------------------------ the device's thread

    @property
    def has_work(self) -> bool:
        """Whether batches have no result yet. Any thread can ask."""
        return self._ended != self._given

    def work(self, budget_s: float) -> bool:
        began, worked = self._clock(), self._take_computed()
        # cutting costs a little: where there is time, less of it
        self._pace.piece_s = max(self._piece_s, min(budget_s * _PIECE_SHARE, _LONGEST_PIECE_S))
        while (job := self._next_job()) is not None:
            expected_s = self._pace.seconds(job.next.kind, job.next.cost)
            if worked and self._clock() - began + expected_s > budget_s:
                break
            self._compute(job)
            worked = True
        worked |= self._take_computed()
        if not worked and self._launched:
            time.sleep(_NAP_S)  # an idle caller asks again and again
        return worked

    def _take_computed(self) -> bool:
        """Take the results of launched batches that are computed; return True if there were any."""
        taken = False
        while self._launched:
            mark, result = self._launched[0]
            passed, error = attempt(mark.passed)
            if passed is False:
                break
            self._launched.popleft()
            if error:
                result = EncodeResult(number=result.number, embeds=None, error=error)
            elif result.embeds is not None:
                self._lane.hand_over(result.embeds)
            self._end(result)
            taken = True
        return taken

    def _next_job(self) -> _Job | None:
        """Take new messages, begin batches if there is room, and choose the next job."""
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, _Cancel):
                self._drop(message.number)
            else:
                self._waiting.append(message)
        while self._waiting and len(self._jobs) < self._most_batches:
            self._begin(self._waiting.popleft())
        if not self._jobs:
            return None
        first, shortest = self._jobs[0], min(self._jobs, key=self._left_s)
        owed = self._pace.seconds(first.next.kind, first.next.cost)
        return first if self._owed_s >= owed else shortest

    def _left_s(self, job: _Job) -> float:
        return sum(self._pace.seconds(kind, cost) for kind, cost in job.left.items())

    def _begin(self, batch: EncodeBatch) -> None:
        steps = self._runner.steps(batch.patches, self._pace.most)
        piece, error = attempt(lambda: self._resume(steps))
        if isinstance(piece, Piece):
            self._jobs.append(
                _Job(number=batch.number, steps=steps, next=piece, left=dict(self._runner.cost(batch.patches)))
            )
        else:
            self._launched.append((self._lane.mark(), EncodeResult(number=batch.number, embeds=piece, error=error)))

    def _compute(self, job: _Job) -> None:
        piece, began = job.next, self._clock()
        following, error = attempt(lambda: self._resume(job.steps))
        took_s = self._clock() - began
        self._pace.took(piece, took_s)
        job.left[piece.kind] = max(0.0, job.left.get(piece.kind, 0.0) - piece.cost)
        if job is not self._jobs[0]:
            self._owed_s += took_s / (_FIRST_SHARE - 1)
        elif len(self._jobs) > 1:
            self._owed_s = max(0.0, self._owed_s - took_s)
        if isinstance(following, Piece):
            job.next = following
        else:
            self._remove(job)
            self._launched.append((self._lane.mark(), EncodeResult(number=job.number, embeds=following, error=error)))

    def _drop(self, number: int) -> None:
        """Give up a batch, unless it has ended."""
        job = next((job for job in self._jobs if job.number == number), None)
        still_waiting = deque(batch for batch in self._waiting if batch.number != number)
        if job is not None:
            job.steps.close()
            self._remove(job)
        elif len(still_waiting) == len(self._waiting):
            return
        self._waiting = still_waiting
        self._end(EncodeResult(number=number, embeds=None, error="nobody wants it any more", untried=True))

    def _remove(self, job: _Job) -> None:
        if job is self._jobs[0]:
            self._owed_s = 0.0
        self._jobs.remove(job)

    def _end(self, result: EncodeResult) -> None:
        self._results.append(result)
        self._ended += 1

    def _resume(self, steps: Steps[tuple[torch.Tensor, ...]]) -> Piece | tuple[torch.Tensor, ...]:
        """Compute the next piece; return the one after it, or the result."""
        with torch.inference_mode(), self._lane.launching():
            try:
                return next(steps)
            except StopIteration as end:
                result: tuple[torch.Tensor, ...] = end.value
                return result
