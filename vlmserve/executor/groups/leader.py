"""The first rank: has rounds computed by all, and alone samples, for all groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch

from vlmserve.executor.forwarded import Forwarded
from vlmserve.executor.groups.orders import ForwardRound, RoundCodec, SampleRound
from vlmserve.executor.groups.part import RoundPart
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import (
    RECENT_TOKENS,
    ModelWorkerBatch,
    PendingResult,
    SamplingBatchInfo,
)
from vlmserve.executor.ranks.orders import ForwardOrder, SampleOrder, to_come
from vlmserve.executor.step_inputs import places_of
from vlmserve_common.compute.token_exchange import TokenExchange
from vlmserve_common.compute.transfers import to_device, transfers_for
from vlmserve_common.errors import DeviceLostError
from vlmserve_common.parallel.ranks import Ranks

Sampling: TypeAlias = tuple[Forwarded, SamplingBatchInfo]


class RoundLeader:
    """See `Rounds` for who calls it. runner: has this rank's part, and the last tokens of the requests of all groups.

    who_died, errors: see `LeadingWorker`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        ranks: Ranks,
        tokens: TokenExchange,
        who_died: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._runner, self._ranks, self._who_died = runner, ranks, who_died
        self._part = RoundPart(runner, tokens, samples=True)
        self._codec = RoundCodec()
        assert ranks.group is not None, "there are several groups"
        self._everybody, self._transfers = ranks.group, transfers_for(runner.device)

    def forward(self, steps: Sequence[ModelWorkerBatch | None]) -> list[Forwarded | None]:
        """Compute a step of each group; None: it has none."""
        with self._together(steps):
            steps = [None if step is None else self._here(step) for step in steps]
            orders = [None if step is None else _order(step) for step in steps]
            self._ranks.orders.give(self._codec.encode(ForwardRound(steps=tuple(orders))))
            for step in steps:
                for part in () if step is None else (*step.mm_embeds, *step.input_embeds):
                    self._everybody.broadcast(part.embeds)
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
                    began=began,
                    ended=ended,
                )
                for group, (step, brought) in enumerate(zip(steps, returned, strict=True))
            ]

    def sample(self, steps: Sequence[Sampling | None]) -> list[PendingResult | None]:
        """The tokens of a step of each group; None: none of it is sampled now."""
        with self._together([None if step is None else step[0] for step in steps]):
            orders = [None if step is None else self._sample_order(group, *step) for group, step in enumerate(steps)]
            self._ranks.orders.give(self._codec.encode(SampleRound(steps=tuple(orders))))
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
                self._everybody.broadcast(torch.cat(tokens))
            return results

    def _sample_order(self, group: int, forwarded: Forwarded, info: SamplingBatchInfo) -> SampleOrder:
        return SampleOrder(
            step=forwarded.step,
            token_indices=info.token_indices,
            req_pool_indices=forwarded.req_pool_indices[info.batch_indices] - self._first_row(group),
            places=(forwarded.places[info.token_indices] + 1) % RECENT_TOKENS,
        )

    def _first_row(self, group: int) -> int:
        """Of the last tokens of a group's requests, here."""
        return group * self._runner.req_to_token_pool.size

    def _here(self, step: ModelWorkerBatch) -> ModelWorkerBatch:
        device = self._runner.device
        mm_embeds, input_embeds = (
            tuple(replace(part, embeds=to_device(part.embeds, device).contiguous()) for part in parts)
            for parts in (step.mm_embeds, step.input_embeds)
        )
        return replace(step, mm_embeds=mm_embeds, input_embeds=input_embeds)

    @contextmanager
    def _together(self, steps: Sequence[ModelWorkerBatch | Forwarded | None]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            numbers = ", ".join("none" if step is None else str(step.step) for step in steps)
            why = self._who_died() or error
            raise DeviceLostError(f"steps {numbers} of the groups failed, and ranks cannot go on: {why}") from error


def _order(step: ModelWorkerBatch) -> ForwardOrder:
    return ForwardOrder(
        batch=replace(step, mm_embeds=(), input_embeds=()),
        mm_embeds=to_come(step.mm_embeds),
        input_embeds=to_come(step.input_embeds),
    )
