"""The interface between decoder layers and attention kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from vlmserve.executor.forward_batch import ForwardBatch


class RadixAttention(nn.Module):
    """A decoder layer's attention over the paged KV cache; owns no weights."""

    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scaling = scaling
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """q [N, num_heads, head_dim], k and v [N, num_kv_heads, head_dim] -> [N, num_heads * head_dim]."""
        return forward_batch.attn_backend.forward(q, k, v, self, forward_batch)


class AttentionBackend(ABC):
    """Writes this step's K/V into the cache and attends over it."""

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Work done once a step, before the first layer."""

    @abstractmethod
    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Rows of any length, causal over prefix + extend. Shapes as in `RadixAttention.forward`."""

    @abstractmethod
    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Rows of length one."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Dispatch by forward mode."""
        if forward_batch.forward_mode.is_decode():
            return self.forward_decode(q, k, v, layer, forward_batch)
        return self.forward_extend(q, k, v, layer, forward_batch)
