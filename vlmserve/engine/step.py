"""A step in flight: launched on the device, not processed yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vlmserve.executor.device_queue import Work
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, ModelWorkerResult, PendingResult, SamplingBatchInfo
from vlmserve.scheduler.schedule_batch import ScheduleBatch


class ModelWorker(Protocol):
    """Computes the steps of one scheduler: the `ModelRunner`, a process that holds one, or a test's fake."""

    def forward(self, batch: ModelWorkerBatch) -> Any:
        """Compute a step without its sampling. Returns the states that tokens are sampled from."""
        ...

    def sample(self, forwarded: Any, info: SamplingBatchInfo) -> PendingResult:
        """Launch the sampling of a step's tokens."""
        ...


class GroupsWorker(Protocol):
    """Computes the steps of several attention groups together. Each list has an entry for each group, in their order;
    None is a group that takes no part."""

    def forward(self, steps: Sequence[ModelWorkerBatch | None]) -> Sequence[Any]:
        """Compute a step of each group without its sampling. Returns the states that tokens are sampled from."""
        ...

    def sample(self, steps: Sequence[tuple[Any, SamplingBatchInfo] | None]) -> Sequence[PendingResult | None]:
        """Launch the sampling of the tokens of each group's step."""
        ...


class OneGroup:
    """Gives a `ModelWorker` the form of a `GroupsWorker`, for an engine with one scheduler."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker

    def forward(self, steps: Sequence[ModelWorkerBatch | None]) -> list[Any]:
        """Compute the only step."""
        (step,) = steps
        assert step is not None
        return [self.worker.forward(step)]

    def sample(self, steps: Sequence[tuple[Any, SamplingBatchInfo] | None]) -> list[PendingResult | None]:
        """Sample the only step."""
        (step,) = steps
        assert step is not None
        return [self.worker.sample(*step)]


class StepHandle:
    """Launches one step of all groups on the device: a forward pass, and the sampling of its tokens.

    A group whose batch `samples_late` is sampled by a second call of `sample`, when the tokens in flight have come.
    batches: of each group; None where a group has none. submit: hands work to the device, see `DeviceQueue`.
    """

    def __init__(
        self,
        submit: Callable[..., Work[Any]],
        worker: GroupsWorker,
        batches: Sequence[ScheduleBatch | None],
        number: int,
    ) -> None:
        self.batches = batches
        self.number = number
        self._submit = submit
        self._worker = worker
        self._sampled: list[Work[Sequence[PendingResult | None]] | None] = [None] * len(batches)
        self._results: list[ModelWorkerResult | None] = []
        messages = [None if batch is None else batch.get_model_worker_batch(number) for batch in batches]
        self._forwarded: Work[Sequence[Any]] = submit(worker.forward, messages)
        now, self._late = list[int](), list[int]()
        for group, batch in enumerate(batches):
            if batch is not None:
                (self._late if batch.samples_late else now).append(group)
        self._sample(now)

    @property
    def is_sampled(self) -> bool:
        """Return True if the sampling of all groups has been launched. Later steps read the sampled tokens."""
        return not self._late

    def sample(self) -> None:
        """Launch the sampling of groups that had to wait, by the tokens known now."""
        if self._late:
            late, self._late = self._late, []
            self._sample(late)

    def results(self) -> Sequence[ModelWorkerResult | None]:
        """Wait for the step and return each group's result. An error of the step is raised here.

        An interrupted wait can be repeated: results that have come are kept.
        """
        self.sample()
        for group in range(len(self._results), len(self.batches)):
            work, result = self._sampled[group], None
            if work is not None:
                pending = work.result()[group]
                assert pending is not None
                result = pending.result()
            self._results.append(result)
        return self._results

    def _sample(self, groups: Sequence[int]) -> None:
        infos: list[SamplingBatchInfo | None] = [None] * len(self.batches)
        for group in groups:
            batch = self.batches[group]
            assert batch is not None
            infos[group] = batch.sampling_info()
        if groups:
            work = self._submit(self._launch_sampling, infos)
            for group in groups:
                self._sampled[group] = work

    def _launch_sampling(self, infos: Sequence[SamplingBatchInfo | None]) -> Sequence[PendingResult | None]:
        forwarded = self._forwarded.result()
        return self._worker.sample(
            [None if info is None else (forwarded[group], info) for group, info in enumerate(infos)]
        )
