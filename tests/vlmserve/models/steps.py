"""Steps for decoders and attention backends under test."""

from __future__ import annotations

from typing import Any

import torch

from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode


def forward_batch(
    backend: AttentionBackend,
    prefix_lens: list[int],
    extend_lens: list[int],
    *,
    rows: list[int] | None = None,
    pool: ReqToTokenPool | None = None,
    device: torch.device | str = "cpu",
    **fields: Any,
) -> ForwardBatch:
    """A step of requests in these rows of a pool (0, 1, ... by default), whose slots are those of the pool. fields: of
    the batch, if they are to differ."""
    totals = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
    rows = list(range(len(totals))) if rows is None else rows
    count = sum(extend_lens)
    places = zip(rows, prefix_lens, totals, strict=True)
    slots = [] if pool is None else [pool.req_to_token[row, start:end].long() for row, start, end in places]
    made = {
        "forward_mode": ForwardMode.DECODE if set(extend_lens) == {1} else ForwardMode.MIXED,
        "input_ids": torch.zeros(count, dtype=torch.int64, device=device),
        "positions": torch.zeros((3, count), dtype=torch.int64, device=device),
        "req_pool_indices": torch.tensor(rows, device=device),
        "seq_lens": torch.tensor(totals, dtype=torch.int32, device=device),
        "extend_start_loc": torch.tensor([0, *extend_lens], device=device).cumsum(0, dtype=torch.int32),
        "prefix_lens": prefix_lens,
        "extend_lens": extend_lens,
        "out_cache_loc": torch.cat(slots) if slots else torch.arange(count, device=device),
        "req_to_token_pool": pool,
        "kv_cache": None,
        "attn_backend": backend,
    }
    return ForwardBatch(**(made | fields))
