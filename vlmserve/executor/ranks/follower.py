"""All ranks but the first: each computes its part of what it is told of. Where there is one stage, they remember what
the first one sampled; where there are several, the last stage's first rank samples."""

from __future__ import annotations

from dataclasses import replace

import torch

from vlmserve.executor.forwarded import Forwarded
from vlmserve.executor.logprobs import prompt_tiles
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, PromptLogprobRows, without_returns
from vlmserve.executor.ranks.orders import ForwardOrder, OrderCodec, SampleOrder, SampleThereOrder, receive_rows
from vlmserve_common.compute.transfers import Upload, transfers_for
from vlmserve_common.parallel.ranks import Ranks

_META = torch.device("meta")


class Follower:
    """Call `obey` again and again. RankLostError when another rank is gone."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._codec = OrderCodec()
        self.await_order = ranks.take_orders()
        """The next order; waits for it."""
        self._forwarded: dict[int, Forwarded] = {}  # steps that are not sampled yet

    @torch.inference_mode()
    def obey(self, order: bytes) -> None:
        """Do as an order says."""
        decoded = self._codec.decode(order)
        if isinstance(decoded, ForwardOrder):
            self._forward(decoded)
        elif not self._ranks.shard.stage.is_last:
            return
        elif isinstance(decoded, SampleThereOrder):
            self._sample_here(decoded)
        else:
            self._take_part_in_sampling(decoded)

    def _forward(self, order: ForwardOrder) -> None:
        shard, returned = self._ranks.shard, order.batch.prompt_logprobs
        batch = self._with_rows(order)
        forwarded = self._runner.forward(batch if shard.samples else without_returns(batch))
        if shard.stage.is_last:
            self._forwarded[batch.step] = forwarded
            if returned is not None and not shard.samples:
                self._prompt_logits(forwarded.hidden, returned)

    def _with_rows(self, order: ForwardOrder) -> ModelWorkerBatch:
        """The order's batch with the rows of the first stage; a later one is only told where they are."""
        first = self._ranks.shard.stage.is_first
        group, device = (self._ranks.group, self._runner.device) if first else (None, _META)
        mm_embeds = receive_rows(order.mm_embeds, group, device)
        return replace(order.batch, mm_embeds=mm_embeds, input_embeds=receive_rows(order.input_embeds, group, device))

    def _prompt_logits(self, hidden: torch.Tensor, asked: PromptLogprobRows) -> None:
        """This rank's part of the logits, in the tiles in which they are wanted where they come together."""
        upload = Upload(transfers_for(self._runner.device))
        tiles = prompt_tiles(asked, self._runner.model.config.vocab_size, upload)
        upload.send()
        for tile in tiles:
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
