"""What an attention backend is made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlmserve_common.compute.tensors import dtype_name


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """A decoder's heads, and the cache that they are kept in. dtype: of queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page_size: int
    device: torch.device

    @property
    def group_size(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads}"
        return f"{heads}, {dtype_name(self.dtype)}, cache of {dtype_name(self.cache_dtype)}"
