"""Queries, keys and values from the product that makes them."""

from __future__ import annotations

import torch

from vlmserve.models.attention.base import ForwardBatch, RadixAttention
from vlmserve_common.compute.layers import rms_normalise
from vlmserve_common.compute.rotary import Rotation, rotate
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.attention import HeadNorms


def position_and_store(
    qkv: torch.Tensor, rotary: Rotation, norms: HeadNorms | None, layer: RadixAttention, forward_batch: ForwardBatch
) -> torch.Tensor:
    """qkv [N, num_heads + 2 * num_kv_heads, head_dim], which may be overwritten -> q [N, num_heads, head_dim], turned;
    keys, turned, and values are in the KV cache."""
    if fused.usable(qkv):
        from vlmserve_common.kernels.gpu import positions  # not where there is no GPU

        cache = forward_batch.kv_cache.layers[layer.layer_id]
        if positions.can_store(qkv, cache):
            return positions.position_and_store(qkv, rotary, norms, forward_batch.out_cache_loc, cache)
    q, k, v = positioned(qkv, rotary, norms, layer.num_kv_heads)
    forward_batch.kv_cache.write(layer.layer_id, forward_batch.out_cache_loc, k, v)
    return q


def positioned(
    qkv: torch.Tensor, rotary: Rotation, norms: HeadNorms | None, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [N, num_heads + 2 * num_kv_heads, head_dim] -> q [N, num_heads, head_dim], k, v [N, num_kv_heads, head_dim].

    With torch. q and k are divided by their norms in one go and weighted apart, where the model does that, and turned.
    """
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        qk = rms_normalise(qk, norms.eps)
        qk[:, :num_heads].mul_(norms.q_weight)
        qk[:, num_heads:].mul_(norms.k_weight)
    q, k = rotate(qk, *rotary).split([num_heads, num_kv_heads], dim=1)
    return q, k, v
