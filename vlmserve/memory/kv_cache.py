"""The KV cache tensors."""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of every layer by slot: per layer [num_slots, num_kv_heads, head_dim], page-major.

    A run of consecutive slots is a plain slice of these tensors, which is what lets attention read a request's
    history without gathering it. Cleared at the start, so that the memory is committed then and a server
    that starts does not run out of it later.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_kv_heads, head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes one slot takes over all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [N, num_kv_heads, head_dim] at slots int64 [N]."""
        self.k[layer_id].index_copy_(0, slots, k)
        self.v[layer_id].index_copy_(0, slots, v)
