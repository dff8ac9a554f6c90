"""The first rank: computes its part of each step, once the others were told of it. It samples, or, where there are
stages, has the last one do that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from vlmserve.executor.forwarded import Forwarded
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import (
    RECENT_TOKENS,
    MMEmbeds,
    ModelWorkerBatch,
    ModelWorkerResult,
    PendingResult,
    SamplingBatchInfo,
    without_returns,
)
from vlmserve.executor.ranks.orders import ForwardOrder, OrderCodec, SampleOrder, SampleThereOrder, to_come
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.errors import DeviceLostError
from vlmserve_common.parallel.group import ProcessGroup
from vlmserve_common.parallel.ranks import Ranks


class LeadingWorker:
    """A `ModelWorker`. runner: has this rank's part.

    who_died: called when one is gone; names it, if it can, and may wait for that. DeviceLostError from a step on which
    one is gone, or that failed here half-way: the others wait in its midst, and none of them can go on.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, who_died: Callable[[], str | None] = lambda: None) -> None:
        self._runner, self._ranks, self._who_died = runner, ranks, who_died
        self._codec, self._result_codec = OrderCodec(), OrderCodec()  # results are waited for in another thread

    def forward(self, batch: ModelWorkerBatch) -> Forwarded:
        """See `ModelWorker`."""
        with self._together(batch.step):
            mm_embeds, input_embeds = self._here(batch.mm_embeds), self._here(batch.input_embeds)
            order = ForwardOrder(
                batch=replace(batch, mm_embeds=(), input_embeds=()),
                mm_embeds=to_come(mm_embeds),
                input_embeds=to_come(input_embeds),
            )
            self._ranks.orders.give(self._codec.encode(order))
            if self._ranks.group is not None:
                for part in (*mm_embeds, *input_embeds):
                    self._ranks.group.broadcast(part.embeds)
            batch = replace(batch, mm_embeds=mm_embeds, input_embeds=input_embeds)
            return self._runner.forward(batch if self._ranks.shard.samples else without_returns(batch))

    def sample(self, forwarded: Forwarded, info: SamplingBatchInfo) -> PendingResult:
        """See `ModelWorker`."""
        with self._together(forwarded.step):
            group = self._ranks.group
            if group is None or not self._ranks.shard.samples:
                self._ranks.orders.give(self._codec.encode(SampleThereOrder(step=forwarded.step, info=info)))
                return _Awaited(forwarded.step, self._take_result)
            return self._sample_here(forwarded, info, group)

    def _sample_here(self, forwarded: Forwarded, info: SamplingBatchInfo, group: ProcessGroup) -> PendingResult:
        rows = forwarded.req_pool_indices[info.batch_indices]
        places = (forwarded.places[info.token_indices] + 1) % RECENT_TOKENS
        order = SampleOrder(step=forwarded.step, token_indices=info.token_indices, req_pool_indices=rows, places=places)
        self._ranks.orders.give(self._codec.encode(order))
        result = self._runner.sample(forwarded, info)
        if len(rows):
            group.broadcast(self._runner.recent_tokens(rows, places))
        return result

    def _take_result(self, step: int) -> ModelWorkerResult:
        results = self._ranks.results
        assert results is not None
        with self._together(step):
            while (result := self._result_codec.decode_result(results.take())).step < step:
                pass  # of a step that was given up
            return result

    def _here(self, parts: tuple[MMEmbeds, ...]) -> tuple[MMEmbeds, ...]:
        device = self._runner.device
        return tuple(replace(part, embeds=to_device(part.embeds, device).contiguous()) for part in parts)

    @contextmanager
    def _together(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise DeviceLostError(f"step {step} failed, and ranks cannot go on: {self._who_died() or error}") from error


class _Awaited:
    """What comes of a step at the last stage. Results come in the order of steps, and so are to be taken."""

    def __init__(self, step: int, take: Callable[[int], ModelWorkerResult]) -> None:
        self._step, self._take = step, take

    def result(self) -> ModelWorkerResult:
        """See `PendingResult`. To be called once."""
        return self._take(self._step)
