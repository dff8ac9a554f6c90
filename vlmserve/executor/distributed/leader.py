"""The workers of the first rank. They order each step from the other ranks, and compute their own part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch

from vlmserve.executor.distributed.group_part import GroupPart
from vlmserve.executor.distributed.orders import (
    BesidesOrder,
    ForwardRound,
    OrderCodec,
    SampleOrder,
    SampleRound,
    SampleThereOrder,
    forward_order,
)
from vlmserve.executor.model_runner import Forwarded, ModelRunner
from vlmserve.executor.model_worker_batch import (
    RECENT_TOKENS,
    ModelWorkerBatch,
    ModelWorkerResult,
    PendingResult,
    SamplingBatchInfo,
    without_returns,
)
from vlmserve.executor.step_inputs import places_of
from vlmserve_common.compute.transfers import Download, to_device, transfers_for
from vlmserve_common.errors import DeviceLostError
from vlmserve_common.parallel.group import ProcessGroup
from vlmserve_common.parallel.ranks import Ranks

Sampling: TypeAlias = tuple[Forwarded, SamplingBatchInfo]


class LeadingWorker:
    """The `ModelWorker` of a model with one attention group. It samples; in a pipeline, the last stage does.

    who_died: called when a rank is gone; it names that rank if it can, and may wait for its end. DeviceLostError from a
    step in which a rank is gone, or which failed here half-way: the other ranks wait in its middle and cannot go on.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, who_died: Callable[[], str | None] = lambda: None) -> None:
        self._runner, self._ranks, self._who_died = runner, ranks, who_died
        self._transfers = transfers_for(runner.device)
        self._codec, self._result_codec = OrderCodec(), OrderCodec()  # another thread waits for results

    def forward(self, batch: ModelWorkerBatch) -> Forwarded:
        """Have a step computed by all ranks."""
        with self._together(batch.step):
            batch = _embeds_on(batch, self._runner.device)
            self._ranks.orders.give(self._codec.encode(forward_order(batch)))
            if self._ranks.group is not None:
                _hand_on(batch, self._ranks.group)
            return self._runner.forward(batch if self._ranks.shard.samples else without_returns(batch))

    def sample(self, forwarded: Forwarded, info: SamplingBatchInfo) -> PendingResult:
        """Have the tokens of a step sampled."""
        with self._together(forwarded.step):
            group = self._ranks.group
            if group is None or not self._ranks.shard.samples:
                self._ranks.orders.give(self._codec.encode(SampleThereOrder(step=forwarded.step, info=info)))
                drafts = None if forwarded.drafts is None else self._transfers.download([forwarded.drafts])
                return _Awaited(forwarded.step, self._take_result, drafts)
            return self._sample_here(forwarded, info, group)

    def tell(self, order: BesidesOrder) -> None:
        """Give the other ranks an order that is no step."""
        with _together(f"{type(order).__name__} failed", self._who_died):
            self._ranks.orders.give(self._codec.encode(order))

    def _sample_here(self, forwarded: Forwarded, info: SamplingBatchInfo, group: ProcessGroup) -> PendingResult:
        order = _sample_order(forwarded, info)
        self._ranks.orders.give(self._codec.encode(order))
        result = self._runner.sample(forwarded, info)
        if len(order.req_pool_indices):
            group.broadcast(self._runner.recent_tokens(order.req_pool_indices, order.places))
        return result

    def _take_result(self, step: int) -> ModelWorkerResult:
        results = self._ranks.results
        assert results is not None
        with self._together(step):
            while (result := self._result_codec.decode(results.take())).step < step:
                pass  # of a step that was given up
            return result

    def _together(self, step: int) -> AbstractContextManager[None]:
        return _together(f"step {step} failed", self._who_died)


class _Awaited:
    """The result of a step that the last stage samples. Results come, and must be taken, in the order of the steps.
    drafts: guesses, which are known here."""

    def __init__(self, step: int, take: Callable[[int], ModelWorkerResult], drafts: Download | None) -> None:
        self._step, self._take, self._drafts = step, take, drafts

    def result(self) -> ModelWorkerResult:
        """Wait for the result. To be called once."""
        result = self._take(self._step)
        return result if self._drafts is None else replace(result, drafts=self._drafts.arrays()[0])


class GroupLeader:
    """The worker of a model with several attention groups: one call computes a step of each group. It alone samples,
    and its runner knows the last tokens of all groups' requests.

    who_died, errors: those of `LeadingWorker`.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, who_died: Callable[[], str | None] = lambda: None) -> None:
        assert ranks.group is not None, "there are several groups"
        self._runner, self._orders, self._who_died = runner, ranks.orders, who_died
        self._part = GroupPart(runner, ranks.comm, samples=True)
        self._codec = OrderCodec()
        self._every_rank, self._transfers = ranks.group, transfers_for(runner.device)

    def forward(self, steps: Sequence[ModelWorkerBatch | None]) -> list[Forwarded | None]:
        """Have one step of each group computed by all ranks; None for a group without one."""
        with self._together(steps):
            steps = [None if step is None else _embeds_on(step, self._runner.device) for step in steps]
            orders = tuple(None if step is None else forward_order(step) for step in steps)
            self._orders.give(self._codec.encode(ForwardRound(steps=orders)))
            for step in steps:
                if step is not None:
                    _hand_on(step, self._every_rank)
            began = self._transfers.mark()
            returned = self._part.forward(steps)
            ended = self._transfers.mark()
            return [
                None
                if step is None
                else Forwarded(
                    step=step.step,
                    req_pool_indices=step.req_pool_indices + self._first_row(group),
                    places=places_of(step),
                    hidden=self._part.no_rows(),
                    returned=brought.hidden_states,
                    prompt_logprobs=brought.prompt_logprobs,
                    drafts=brought.drafts,
                    began=began,
                    ended=ended,
                )
                for group, (step, brought) in enumerate(zip(steps, returned, strict=True))
            ]

    def sample(self, steps: Sequence[Sampling | None]) -> list[PendingResult | None]:
        """Have the tokens of one step of each group sampled; None for a group without one."""
        with self._together([None if step is None else step[0] for step in steps]):
            orders = [
                None if step is None else _sample_order(*step, first_row=self._first_row(group))
                for group, step in enumerate(steps)
            ]
            self._orders.give(self._codec.encode(SampleRound(steps=tuple(orders))))
            results: list[PendingResult | None] = []
            tokens: list[torch.Tensor] = []
            for step, order, logits in zip(steps, orders, self._part.logits(orders), strict=True):
                if step is None or order is None:
                    results.append(None)
                    continue
                results.append(self._runner.sample(*step, logits=logits))
                rows = step[0].req_pool_indices[step[1].batch_indices]
                if len(rows):
                    tokens.append(self._runner.recent_tokens(rows, order.places))
            if tokens:
                self._every_rank.broadcast(torch.cat(tokens))
            return results

    def tell(self, order: BesidesOrder) -> None:
        """See `LeadingWorker`."""
        with _together(f"{type(order).__name__} failed", self._who_died):
            self._orders.give(self._codec.encode(order))

    def _first_row(self, group: int) -> int:
        """Return where a group's rows begin among the last tokens that this rank's runner knows."""
        return group * self._runner.req_to_token_pool.size

    def _together(self, steps: Sequence[ModelWorkerBatch | Forwarded | None]) -> AbstractContextManager[None]:
        numbers = ", ".join("none" if step is None else str(step.step) for step in steps)
        return _together(f"steps {numbers} of the groups failed", self._who_died)


@contextmanager
def _together(what: str, who_died: Callable[[], str | None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DeviceLostError(f"{what}, and ranks cannot go on: {who_died() or error}") from error


def _embeds_on(batch: ModelWorkerBatch, device: torch.device) -> ModelWorkerBatch:
    mm_embeds, input_embeds = (
        tuple(replace(part, embeds=to_device(part.embeds, device).contiguous()) for part in parts)
        for parts in (batch.mm_embeds, batch.input_embeds)
    )
    return replace(batch, mm_embeds=mm_embeds, input_embeds=input_embeds)


def _hand_on(batch: ModelWorkerBatch, group: ProcessGroup) -> None:
    for part in (*batch.mm_embeds, *batch.input_embeds):
        group.broadcast(part.embeds)


def _sample_order(forwarded: Forwarded, info: SamplingBatchInfo, *, first_row: int = 0) -> SampleOrder:
    """first_row: where the group's requests begin in the leader's table; its followers count from 0."""
    return SampleOrder(
        step=forwarded.step,
        token_indices=info.token_indices,
        req_pool_indices=forwarded.req_pool_indices[info.batch_indices] - first_row,
        places=(forwarded.places[info.token_indices] + 1) % RECENT_TOKENS,
    )
