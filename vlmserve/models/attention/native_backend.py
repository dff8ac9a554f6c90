"""Attention by our own operators, on a CPU: one call for all requests and heads of a step, prompts and decoding
alike."""

from __future__ import annotations

import numpy as np
import torch

from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, Projected, RadixAttention, RunLayers
from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.kernels.attention import attend, write_kv
from vlmserve_common.kernels.decoder import DecoderLayers, DecoderStep


class NativeAttentionBackend(AttentionBackend):
    """Attends over the KV cache, which has this step's keys and values already.

    A token's answer depends on its request alone, bit for bit: not on batch mates, nor on chunk sizes.
    """

    def __init__(self) -> None:
        self._requests = torch.zeros((0, 4), dtype=torch.int64)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Collect each request's arguments of `kernels.attention.attend`."""
        plan = np.empty((len(forward_batch.extend_lens), 4), dtype=np.int64)
        plan[:, 0] = forward_batch.req_pool_indices.numpy()
        plan[:, 1] = forward_batch.prefix_lens
        plan[:, 2] = forward_batch.extend_lens
        plan[:, 3] = plan[:, 2].cumsum() - plan[:, 2]
        self._requests = torch.from_numpy(plan)

    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attend; queries are replaced in qkv."""
        cache = forward_batch.kv_cache.layers[layer.layer_id]
        slots, table = forward_batch.slots_of(windowed=layer.window > 0)
        write_kv(own.qkv, *own.rotary, own.norms, slots, cache)
        return attend(own.qkv, layer.scaling, self._requests, table, cache, layer.window)

    def attend_chosen(
        self,
        own: Projected,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        slots: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """See `AttentionBackend`: each token is a request of its own, whose tokens lie in its slots."""
        cache = forward_batch.kv_cache.layers[layer.layer_id]
        write_kv(own.qkv, *own.rotary, own.norms, forward_batch.out_cache_loc, cache)
        rows = torch.arange(len(slots))
        requests = torch.stack((rows, counts - 1, torch.ones_like(rows), rows), dim=1)
        return attend(own.qkv, layer.scaling, requests, slots, cache)

    def whole_layers(self, layers: DecoderLayers, rotary: Rotation, forward_batch: ForwardBatch) -> RunLayers:
        """Return the operator that computes whole layers, if it can."""
        window_slots, window_table = forward_batch.slots_of(windowed=True)
        step = DecoderStep(
            cos=rotary[0],
            sin=rotary[1],
            slots=forward_batch.out_cache_loc,
            requests=self._requests,
            table=forward_batch.req_to_token_pool.req_to_token,
            window_slots=window_slots,
            window_table=window_table,
            caches=forward_batch.kv_cache.table,
        )

        def run(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
            layers.run(x, first, last, step)
            return x

        return run
