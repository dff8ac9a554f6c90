"""Heads of a checkpoint itself that guess further tokens (multi-token prediction, MTP): what all share, and that of
Qwen3.5."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from vlmserve.models.attention.base import ForwardBatch
from vlmserve.models.config import ModelConfig
from vlmserve.models.qwen3_5 import GatedAttention, HybridLayer, make_rotary
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.layers import ZeroCentredRMSNorm
from vlmserve_common.compute.linear import Linear


class MTPHead(nn.Module, ABC):
    """One decoder layer over entries. The entry of token i joins what the model handed on for token i - 1 with the
    embedding of token i, and predicts token i + 1. It has the rotary position of token i - 1.

    The entry's keys and values lie in the KV slot of token i, in a layer of the cache behind those of the model. So a
    slot depends on the tokens up to its own, and may be shared as the model's may. The first token has no entry, and
    nothing attends to its slot.

    For a further guess, the head's own output takes the model's place. Embedding and head are the model's.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, layer: nn.Module) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(config.stream_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([layer])
        self._rotary = make_rotary(config, dtype)

    @abstractmethod
    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of N entries. Return what takes `hidden`'s place for a further guess, and what logits are made
        of, [N, hidden].

        embeds [N, hidden]: of the entries' tokens. hidden [N, streams * hidden], positions int64 [3, N]: of the tokens
        before.
        """

    @abstractmethod
    def store(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> None:
        """Write the KV of entries that nothing is guessed from: with a single layer, it needs no attention.
        forward_batch: a step of the model."""

    def join(self, x: torch.Tensor) -> None:
        """Join the collectives of other groups' entries while this group has none, given x [0, hidden]."""
        self._layer.mlp(x)

    @property
    def _layer(self) -> Any:
        return self.layers[0]


class HybridMTPHead(MTPHead):
    """The head of Qwen3.5. It goes on from final hidden states."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, comm: Communicator) -> None:
        attention = GatedAttention(config, comm, config.of_part().num_kv_layers - 1)
        super().__init__(config, dtype, HybridLayer(config, comm, attention))
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MTPHead`."""
        x = self._join(embeds, hidden)
        x = self.norm(self._layer(x, self._rotary(positions), forward_batch))
        return x, x

    def store(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> None:
        """See `MTPHead`."""
        x = self._layer.input_layernorm(self._join(embeds, hidden))
        self._layer.self_attn.store(x, self._rotary(positions), forward_batch)

    def _join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)), dim=-1))
