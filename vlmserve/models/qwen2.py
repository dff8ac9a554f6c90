"""The decoder of Qwen2-VL and Qwen2.5-VL: biased q, k, v projections, M-RoPE in runs."""

from __future__ import annotations

import torch

from vlmserve.models.config import ModelConfig, ModelDefaults
from vlmserve.models.decoder import Decoder, DecoderAttention
from vlmserve.models.rotary import MRotary, contiguous_axes

QWEN2_DEFAULTS = ModelDefaults(rope_theta=1_000_000.0, mrope_section=(16, 24, 24))


class Qwen2Attention(DecoderAttention):
    """See `DecoderAttention`."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__(config, layer_id, qkv_bias=True, out_bias=False)


class Qwen2Decoder(Decoder):
    """See `Decoder`. dtype: what it computes in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        rotary = MRotary(config.head_dim, config.rope_theta, contiguous_axes(config.mrope_section), dtype)
        super().__init__(config, lambda layer_id: Qwen2Attention(config, layer_id), rotary)
