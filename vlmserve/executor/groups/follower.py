"""All ranks but the first: each computes its part of rounds, and remembers what was sampled for its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vlmserve.executor.groups.orders import ForwardRound, RoundCodec
from vlmserve.executor.groups.part import RoundPart
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import ModelWorkerBatch
from vlmserve.executor.ranks.orders import ForwardOrder, SampleOrder, receive_rows
from vlmserve_common.compute.token_exchange import TokenExchange
from vlmserve_common.parallel.ranks import Ranks


class RoundFollower:
    """Call `obey` again and again. RankLostError when another rank is gone."""

    def __init__(self, runner: ModelRunner, ranks: Ranks, tokens: TokenExchange) -> None:
        assert ranks.group is not None, "there are several groups"
        self._runner, self._orders, self._everybody = runner, ranks.orders, ranks.group
        self._group_number = tokens.group
        self._part = RoundPart(runner, tokens, samples=False)
        self._codec = RoundCodec()

    def await_order(self) -> bytes:
        """The next order; waits for it."""
        return self._orders.take()

    def obey(self, order: bytes) -> None:
        """Do as an order says."""
        decoded = self._codec.decode(order)
        if isinstance(decoded, ForwardRound):
            self._part.forward([None if step is None else self._with_rows(step) for step in decoded.steps])
        else:
            self._sample(decoded.steps)

    def _with_rows(self, order: ForwardOrder) -> ModelWorkerBatch:
        # all ranks get the rows of all groups
        group, device = self._everybody, self._runner.device
        return replace(
            order.batch,
            mm_embeds=receive_rows(order.mm_embeds, group, device),
            input_embeds=receive_rows(order.input_embeds, group, device),
        )

    def _sample(self, steps: Sequence[SampleOrder | None]) -> None:
        self._part.logits(steps)
        counts = [0 if step is None else len(step.token_indices) for step in steps]
        if not any(counts):
            return
        sampled = torch.empty(sum(counts), dtype=torch.int64, device=self._runner.device)
        tokens = self._everybody.broadcast(sampled).split(counts)[self._group_number]
        own = steps[self._group_number]
        if own is not None and len(tokens):
            self._runner.remember(own.req_pool_indices, own.places, tokens)
