"""Steps of several schedulers launched as one: what groups of ranks that have requests of their own compute together.

Each scheduler has a `Lane` in place of the device's queue, and a `LaneWorker` in place of the worker. What they submit
is kept until `Rounds.send`, which has it done as one piece of work for the device: first what is sampled of steps of
earlier rounds, for steps of this one may read it; then a step of each group, or none; then what is sampled of these.
Who waits for a result sends the round as it is, so that nobody waits for what was never begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from vlmserve.executor.device_queue import DeviceQueue, Work
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, ModelWorkerResult, PendingResult, SamplingBatchInfo

T = TypeVar("T")


class RoundWorker(Protocol):
    """What computes rounds: a `GroupLeader`, or a test's fake. Of each group there is something, or None."""

    def forward(self, steps: Sequence[ModelWorkerBatch | None]) -> Sequence[Any]:
        """A step of each group, up to what it is sampled from."""
        ...

    def sample(self, steps: Sequence[tuple[Any, SamplingBatchInfo] | None]) -> Sequence[PendingResult | None]:
        """Tokens of a step of each group."""
        ...


class _Step:
    """A step of one group: what its `LaneWorker.forward` returns. forwarded: once it is computed."""

    def __init__(self, batch: ModelWorkerBatch) -> None:
        self.batch = batch
        self.forwarded: Any = None


class _Sampled:
    """See `PendingResult`. pending: once it is launched."""

    def __init__(self, step: _Step, info: SamplingBatchInfo) -> None:
        self.step, self.info = step, info
        self.pending: PendingResult | None = None

    def result(self) -> ModelWorkerResult:
        assert self.pending is not None
        return self.pending.result()


class LaneWorker:
    """A `ModelWorker`, which only notes what is to be done; in the device's thread."""

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._earlier: _Sampled | None = None
        self._now: _Sampled | None = None

    def forward(self, batch: ModelWorkerBatch) -> _Step:
        """See `ModelWorker`."""
        assert self._step is None, "a round has one step of each group"
        self._step = _Step(batch)
        return self._step

    def sample(self, forwarded: _Step, info: SamplingBatchInfo) -> PendingResult:
        """See `ModelWorker`."""
        sampled = _Sampled(forwarded, info)
        if forwarded is self._step:
            self._now = sampled
        else:
            assert self._earlier is None, "steps are sampled in turn"
            self._earlier = sampled
        return sampled

    def take(self) -> tuple[_Sampled | None, _Step | None, _Sampled | None]:
        """What is sampled of an earlier step, the step, and what is sampled of this."""
        found = self._earlier, self._step, self._now
        self._earlier = self._step = self._now = None
        return found


class _Item(Generic[T]):
    """Something that was submitted."""

    def __init__(self, rounds: Rounds, run: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._rounds, self._run, self._args = rounds, run, args
        self._value: T
        self.round: _Round | None = None

    def run(self) -> None:
        self._value = self._run(*self._args)

    def result(self) -> T:
        if self.round is None:
            self._rounds.send()
        assert self.round is not None
        self.round.wait()
        return self._value


class _Round:
    """thread: that it is computed by, while it is."""

    def __init__(self) -> None:
        self.work: Work[None] | None = None
        self.is_awaited = False
        self.thread: int | None = None

    def wait(self) -> None:
        if self.thread == threading.get_ident():  # one part of it reads what another one noted
            return
        assert self.work is not None
        self.is_awaited = True
        self.work.result()


class Lane:
    """A `DeviceQueue` of one group."""

    def __init__(self, rounds: Rounds, device: DeviceQueue) -> None:
        self._rounds = rounds
        self.depth, self.least_reqs = device.depth, device.least_reqs
        self.worker = LaneWorker()

    def submit(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """See `DeviceQueue`."""
        return self._rounds.add(run, args, overlaps=True)

    def here(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """See `DeviceQueue`; at once if nobody in the round submits anything otherwise."""
        return self._rounds.add(run, args, overlaps=False)

    def close(self) -> None:
        """See `DeviceQueue`. What all lanes stand on is closed by who made it."""


class Rounds:
    """device: where they are computed, by `worker`. last: what of the work that is submitted is done behind the steps
    of its round, for nobody waits for it."""

    def __init__(
        self, device: DeviceQueue, worker: RoundWorker, groups: int, *, last: Callable[..., Any] | None = None
    ) -> None:
        self.lanes = tuple(Lane(self, device) for _ in range(groups))
        self._device, self._worker, self._last = device, worker, last
        self._items: list[_Item[Any]] = []
        self._later: list[_Item[Any]] = []
        self._overlaps = False
        self._sent: list[_Round] = []

    def add(self, run: Callable[..., T], args: tuple[Any, ...], *, overlaps: bool) -> Work[T]:
        """Something that is to be done in the next round. overlaps: while the caller goes on."""
        item = _Item(self, run, args)
        (self._later if run == self._last else self._items).append(item)
        self._overlaps |= overlaps
        return item

    def send(self) -> None:
        """Launch what was submitted, if anything was."""
        items, later = self._items, self._later
        if not items and not later:
            return
        self._sent = [sent for sent in self._sent if not sent.is_awaited]
        submit = self._device.submit if self._overlaps or self._sent else self._device.here
        self._items, self._later, self._overlaps = [], [], False
        this = _Round()
        for item in (*items, *later):
            item.round = this
        this.work = submit(self._run, this, items, later)
        self._sent.append(this)

    def close(self) -> None:
        """See `DeviceQueue.close`."""
        self._device.close()

    def _run(self, this: _Round, items: Sequence[_Item[Any]], later: Sequence[_Item[Any]]) -> None:
        this.thread = threading.get_ident()
        try:
            for item in items:
                item.run()
            self._compute(*zip(*(lane.worker.take() for lane in self.lanes), strict=True))
            for item in later:
                item.run()
        finally:
            this.thread = None

    def _compute(
        self, earlier: Sequence[_Sampled | None], steps: Sequence[_Step | None], now: Sequence[_Sampled | None]
    ) -> None:
        self._sample(earlier)
        if any(steps):
            found = self._worker.forward([None if step is None else step.batch for step in steps])
            for step, forwarded in zip(steps, found, strict=True):
                if step is not None:
                    step.forwarded = forwarded
        self._sample(now)

    def _sample(self, asked: Sequence[_Sampled | None]) -> None:
        if any(asked):
            found = self._worker.sample([None if one is None else (one.step.forwarded, one.info) for one in asked])
            for one, pending in zip(asked, found, strict=True):
                if one is not None:
                    one.pending = pending
