"""The device side of one step: what the models and attention backends read."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vlmserve.attention.base import AttentionBackend
    from vlmserve.memory.kv_cache import KVCache
    from vlmserve.memory.req_to_token import ReqToTokenPool


class ForwardMode(enum.IntEnum):
    """EXTEND: prompt chunks. DECODE: one token a request. MIXED: both (decode rows are extends of length one)."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4

    def is_extend(self) -> bool:
        """Whether rows may hold more than one token."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_decode(self) -> bool:
        """Whether every row holds exactly one token."""
        return self is ForwardMode.DECODE


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Device tensors of one forward pass over N tokens of B requests, tokens of a request side by side.

    input_ids int64 [N]; positions int64 [3, N] (M-RoPE: time, height, width); req_pool_indices int64 [B];
    seq_lens / prefix_lens / extend_lens: host lists of length B, seq = prefix + extend (decode: extend 1);
    out_cache_loc int64 [N]: the KV slot each token is written to.
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    rows: list[int]
    seq_lens: list[int]
    prefix_lens: list[int]
    extend_lens: list[int]
    out_cache_loc: torch.Tensor
    req_to_token_pool: ReqToTokenPool
    kv_cache: KVCache
    attn_backend: AttentionBackend

    @property
    def batch_size(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens)
