"""The head of Qwen4Exp that guesses further tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from vlmserve.models.attention.base import ForwardBatch
from vlmserve.models.config import ModelConfig
from vlmserve.models.mtp import MTPHead
from vlmserve.models.qwen4_exp.decoder import StreamsLayer
from vlmserve.models.qwen4_exp.sparse import BlockPlan, SparseAttention
from vlmserve.models.qwen4_exp.streams import StreamMixer
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.linear import Linear


class StreamsMTPHead(MTPHead):
    """The head of Qwen4Exp. It goes on from all residual streams behind the model's last layer, and hands its own on to
    the next guess.

    All streams are normed as one vector; then each goes through the same product, and the token's embedding is added.
    Blocks of its sparse attention are blocks of entries, so the first one begins with the entry of the second token.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, comm: Communicator) -> None:
        assert config.index is not None
        attention = SparseAttention(config, comm, config.of_part().num_kv_layers - 1)
        super().__init__(config, dtype, StreamsLayer(config, comm, attention, None))
        self.fc_embedding = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.fc_hidden = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.hyper_connection_mixer = StreamMixer(config)
        self._index = config.index

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MTPHead`."""
        step = replace(forward_batch, blocks=BlockPlan.of(forward_batch, self._index))
        x = self._layer(self._join(embeds, hidden), self._rotary(positions), step)
        return x, self.hyper_connection_mixer(x)

    def store(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> None:
        """See `MTPHead`."""
        entries = replace(
            forward_batch,
            prefix_lens=[length - 1 for length in forward_batch.prefix_lens],
            req_to_token_pool=forward_batch.req_to_token_pool.without_first(),
        )
        blocks = BlockPlan.of(entries, self._index, asks=False)
        x, _ = self._layer.attn_hyper_connection.read(self._join(embeds, hidden))
        self._layer.self_attn.store(x, self._rotary(positions), replace(entries, blocks=blocks))

    def _join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        token = self.fc_embedding(self.pre_fc_norm_embedding(embeds))
        streams = self.pre_fc_norm_hidden(hidden).view(-1, token.shape[-1])
        return (self.fc_hidden(streams).view(len(token), -1, token.shape[-1]) + token.unsqueeze(1)).flatten(1)
