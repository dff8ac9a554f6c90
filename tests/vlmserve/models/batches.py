"""Steps of requests whose slots are in a request table, and configurations, for tests of layers and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.config import ModelConfig
from vlmserve_common.checkpoint.rope import Rope


def forward_batch(
    backend: AttentionBackend,
    pool: ReqToTokenPool,
    cache: KVCache,
    rows: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    **more: Any,
) -> ForwardBatch:
    """Make the batch of a step. rows: of each request in the table, which has its slots already. lengths: tokens of
    each request before the step, and in it. more: other fields."""
    table, device = pool.req_to_token, pool.req_to_token.device
    before, new = ([*part] for part in zip(*lengths, strict=True))
    slots = [table[row, past : past + count] for row, (past, count) in zip(rows, lengths, strict=True)]
    fields = {
        "forward_mode": ForwardMode.DECODE if set(new) == {1} else ForwardMode.MIXED,
        "input_ids": torch.zeros(sum(new), dtype=torch.int64, device=device),
        "positions": torch.zeros((3, sum(new)), dtype=torch.int64, device=device),
        "req_pool_indices": torch.tensor(rows, device=device),
        "seq_lens": torch.tensor([past + count for past, count in lengths], dtype=torch.int32, device=device),
        "extend_start_loc": torch.tensor([0, *new], device=device).cumsum(0, dtype=torch.int32),
        "out_cache_loc": torch.cat(slots).long(),
    }
    return ForwardBatch(
        **fields | more,
        prefix_lens=before,
        extend_lens=new,
        req_to_token_pool=pool,
        kv_cache=cache,
        attn_backend=backend,
    )


def make_config(**changes: Any) -> ModelConfig:
    """Make the configuration of a small decoder."""
    fields = {
        "family": "any",
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 50,
        "context_length": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope": Rope(theta=500.0),
        "mrope_section": (6, 5, 5),
        "tie_word_embeddings": True,
        "eos_token_ids": (1,),
        "dtype": torch.float32,
    }
    return ModelConfig(**fields | changes)
