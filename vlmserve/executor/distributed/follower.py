"""The workers of all ranks but the first. Each computes its part of the steps that the first rank orders.

In a model of one stage, followers remember the tokens that the first rank samples. In a pipeline, the first rank of the
last stage samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlmserve.executor.distributed.group_part import GroupPart
from vlmserve.executor.distributed.orders import (
    BESIDES_ORDERS,
    BesidesOrder,
    ForwardOrder,
    ForwardRound,
    OrderCodec,
    SampleOrder,
    SampleThereOrder,
    with_rows,
)
from vlmserve.executor.logprobs import sent_tiles
from vlmserve.executor.model_runner import Forwarded, ModelRunner
from vlmserve.executor.model_worker_batch import PromptLogprobRows, without_returns
from vlmserve_common.parallel.ranks import Ranks

_META = torch.device("meta")


class Follower:
    """A rank whose model has one attention group. Call `obey` with one order after the other. RankLostError when
    another rank is gone. besides: obeys orders that are no steps; never raises but RankLostError."""

    def __init__(self, runner: ModelRunner, ranks: Ranks, besides: Callable[[BesidesOrder], None]) -> None:
        self._besides = besides
        self._runner, self._ranks = runner, ranks
        self._codec = OrderCodec()
        self.await_order = ranks.take_orders()
        """Waits for the next order, and returns it."""
        self._forwarded: dict[int, Forwarded] = {}  # steps that are not sampled yet

    @torch.inference_mode()
    def obey(self, order: bytes) -> None:
        """Do as an order says."""
        decoded = self._codec.decode(order)
        if isinstance(decoded, BESIDES_ORDERS):
            self._besides(decoded)
        elif isinstance(decoded, ForwardOrder):
            self._forward(decoded)
        elif not self._ranks.shard.stage.is_last:
            return
        elif isinstance(decoded, SampleThereOrder):
            self._sample_here(decoded)
        else:
            self._take_part_in_sampling(decoded)

    def _forward(self, order: ForwardOrder) -> None:
        shard, returned = self._ranks.shard, order.batch.prompt_logprobs
        # later stages get no embeddings, only their places
        group, device = (self._ranks.group, self._runner.device) if shard.stage.is_first else (None, _META)
        batch = with_rows(order, group, device)
        forwarded = self._runner.forward(batch if shard.samples else without_returns(batch))
        if shard.stage.is_last:
            self._forwarded[batch.step] = forwarded
            if returned is not None and not shard.samples:
                self._prompt_logits(forwarded.hidden, returned)

    def _prompt_logits(self, hidden: torch.Tensor, asked: PromptLogprobRows) -> None:
        """Compute this rank's part of a prompt's logits, in the same tiles as the rank that brings them together."""
        for tile in sent_tiles(asked, self._runner.model.config.vocab_size, self._runner.device):
            self._runner.model.compute_logits(hidden.index_select(0, tile.tokens.tensor))

    def _take_part_in_sampling(self, order: SampleOrder) -> None:
        forwarded = self._forwarded.pop(order.step)
        if not len(order.token_indices):
            return
        self._runner.take_part_in_sampling(forwarded, order.token_indices)
        sampled = torch.empty(len(order.token_indices), dtype=torch.int64, device=self._runner.device)
        group = self._ranks.group
        assert group is not None, "only ranks of one stage take part in sampling"
        self._runner.remember(order.req_pool_indices, order.places, group.broadcast(sampled))

    def _sample_here(self, order: SampleThereOrder) -> None:
        forwarded, results = self._forwarded.pop(order.step), self._ranks.results
        if results is not None:
            results.give(self._codec.encode(self._runner.sample(forwarded, order.info).result()))
        elif len(order.info.token_indices):
            self._runner.take_part_in_sampling(forwarded, order.info.token_indices)


class GroupFollower:
    """A rank of a model with several attention groups. It remembers the tokens of its own group's requests. Call `obey`
    with one order after the other. RankLostError when another rank is gone. besides: see `Follower`."""

    def __init__(self, runner: ModelRunner, ranks: Ranks, besides: Callable[[BesidesOrder], None]) -> None:
        self._besides = besides
        assert ranks.group is not None, "there are several groups"
        self._runner, self._every_rank = runner, ranks.group
        self._part = GroupPart(runner, ranks.comm, samples=False)
        self._codec = OrderCodec()
        self.await_order = ranks.orders.take
        """Waits for the next order, and returns it."""

    def obey(self, order: bytes) -> None:
        """Do as an order says."""
        decoded = self._codec.decode(order)
        if isinstance(decoded, BESIDES_ORDERS):
            self._besides(decoded)
        elif isinstance(decoded, ForwardRound):
            # every rank gets the embeddings of all groups
            given = [
                None if step is None else with_rows(step, self._every_rank, self._runner.device)
                for step in decoded.steps
            ]
            self._part.forward(given)
        else:
            self._sample(decoded.steps)

    def _sample(self, steps: Sequence[SampleOrder | None]) -> None:
        self._part.logits(steps)
        counts = [0 if step is None else len(step.token_indices) for step in steps]
        if not any(counts):
            return
        sampled = torch.empty(sum(counts), dtype=torch.int64, device=self._runner.device)
        tokens = self._every_rank.broadcast(sampled).split(counts)[self._part.group]
        own = steps[self._part.group]
        if own is not None and len(tokens):
            self._runner.remember(own.req_pool_indices, own.places, tokens)
