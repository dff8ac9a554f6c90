"""An attention backend that graphs can hold, with torch alone."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, Projected, RadixAttention, position_and_store
from vlmserve.models.attention.torch_backend import TorchAttentionBackend


class PagedBackend(AttentionBackend):
    """Decodes with a few calls of torch over whole rows of the request table; extends as torch's backend does."""

    can_capture = True

    def __init__(self) -> None:
        self._extend = TorchAttentionBackend()
        self._size = 0  # of a captured step; 0: another

    def init_graph_state(self, max_batch_size: int, req_to_token_pool: ReqToTokenPool) -> None:
        context = req_to_token_pool.max_context_len
        self._slots = torch.zeros(max_batch_size, context, dtype=torch.int32)
        self._seen = torch.zeros(max_batch_size, context, dtype=torch.bool)

    def init_graph_metadata(self, forward_batch: ForwardBatch) -> None:
        self._size = size = len(forward_batch.extend_lens)
        assert len(forward_batch.prefix_lens) == size
        assert forward_batch.seq_lens.tolist() == [length + 1 for length in forward_batch.prefix_lens]
        table = forward_batch.req_to_token_pool.req_to_token
        self._slots[:size] = table[forward_batch.req_pool_indices]
        self._seen[:size] = torch.arange(table.shape[1]) < forward_batch.seq_lens[:, None]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._size = 0
        self._extend.init_forward_metadata(forward_batch)

    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        if not self._size:
            return self._extend.forward(own, layer, forward_batch)
        q = position_and_store(own, layer, forward_batch)[:, :, None]
        past = forward_batch.kv_cache.read(layer.layer_id, self._slots[: self._size], q.dtype)
        k, v = (part.transpose(1, 2).repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for part in past)
        seen = self._seen[: self._size, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=layer.scaling).flatten(1)
