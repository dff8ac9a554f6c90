"""A step in flight: launched, not processed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from vlmserve.executor.device_queue import Work
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, ModelWorkerResult, PendingResult, SamplingBatchInfo
from vlmserve.scheduler.schedule_batch import ScheduleBatch


class ModelWorker(Protocol):
    """Whatever computes a step: the `ModelRunner`, a process that holds one, or a test's fake."""

    def forward(self, batch: ModelWorkerBatch) -> Any:
        """A step up to what it is sampled from."""
        ...

    def sample(self, forwarded: Any, info: SamplingBatchInfo) -> PendingResult:
        """Its tokens, which may be still to come."""
        ...


class StepHandle:
    """Launches a step on the device: first its forward pass, and then its sampling, which may have to wait for the
    tokens of the step before."""

    def __init__(
        self, submit: Callable[..., Work[Any]], worker: ModelWorker, batch: ScheduleBatch, number: int
    ) -> None:
        """submit: to the device, see `DeviceQueue`."""
        self.batch = batch
        self.number = number
        self._submit = submit
        self._worker = worker
        self._sampled: Work[PendingResult] | None = None
        self._forwarded = submit(worker.forward, batch.get_model_worker_batch(number))
        if not batch.samples_late:
            self.sample()

    @property
    def is_launched(self) -> bool:
        """Whether its sampling is, too: a later step reads the tokens that come of it."""
        return self._sampled is not None

    def sample(self) -> None:
        """Have it sampled by what is known now, unless that was done."""
        if self._sampled is None:
            self._sampled = self._submit(self._sample, self.batch.sampling_info())

    def result(self) -> ModelWorkerResult:
        """What came of it; raises what it raised. Waits for it."""
        self.sample()
        assert self._sampled is not None
        return self._sampled.result().result()

    def _sample(self, info: SamplingBatchInfo) -> PendingResult:
        return self._worker.sample(self._forwarded.result(), info)
