"""All ranks but the first: each computes its part of what it is told of, and remembers what the first one sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vlmserve.executor.logprobs import prompt_tiles
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import PromptLogprobRows
from vlmserve.executor.ranks.orders import ForwardOrder, OrderCodec, SampleOrder, receive_rows
from vlmserve_common.compute.transfers import Upload, transfers_for
from vlmserve_common.parallel.ranks import Ranks


class Follower:
    """Call `obey` again and again. RankLostError when another rank is gone."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._codec = OrderCodec()
        self._hidden: dict[int, torch.Tensor] = {}  # of steps that are not sampled yet

    def await_order(self) -> bytes:
        """The next order; waits for it."""
        return self._ranks.orders.take()

    @torch.inference_mode()
    def obey(self, order: bytes) -> None:
        """Do as an order says."""
        decoded = self._codec.decode(order)
        if isinstance(decoded, ForwardOrder):
            self._forward(decoded)
        else:
            self._sample(decoded)

    def _forward(self, order: ForwardOrder) -> None:
        group, device = self._ranks.group, self._runner.device
        batch = replace(
            order.batch,
            mm_embeds=receive_rows(order.mm_embeds, group, device),
            input_embeds=receive_rows(order.input_embeds, group, device),
            prompt_logprobs=None,
            hidden_tokens=np.zeros(0, dtype=np.int64),
        )
        hidden = self._hidden[batch.step] = self._runner.forward(batch).hidden
        if order.batch.prompt_logprobs is not None:
            self._prompt_logits(hidden, order.batch.prompt_logprobs)

    def _prompt_logits(self, hidden: torch.Tensor, asked: PromptLogprobRows) -> None:
        """This rank's part of the logits, in the tiles in which the first rank wants them."""
        upload = Upload(transfers_for(self._runner.device))
        tiles = prompt_tiles(asked, self._runner.model.config.vocab_size, upload)
        upload.send()
        for tile in tiles:
            self._runner.model.compute_logits(hidden.index_select(0, tile.tokens.tensor))

    def _sample(self, order: SampleOrder) -> None:
        hidden = self._hidden.pop(order.step)
        if not len(order.token_indices):
            return
        upload = Upload(transfers_for(self._runner.device))
        tokens = upload.add(order.token_indices)
        upload.send()
        self._runner.model.compute_logits(hidden.index_select(0, tokens.tensor))
        sampled = torch.empty(len(order.token_indices), dtype=torch.int64, device=self._runner.device)
        self._runner.remember(order.req_pool_indices, order.places, self._ranks.group.broadcast(sampled))
