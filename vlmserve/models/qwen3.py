"""The decoder of Qwen3-VL, dense or with experts: q and k normalised per head, M-RoPE interleaved."""

from __future__ import annotations

from dataclasses import replace

import torch

from vlmserve.models.config import ModelConfig, ModelDefaults
from vlmserve.models.decoder import Decoder, DecoderAttention
from vlmserve.models.rotary import MRotary, interleaved_axes
from vlmserve_common.compute.layers import RMSNorm
from vlmserve_common.kernels.attention import HeadNorms

QWEN3_DEFAULTS = ModelDefaults(rope_theta=500_000.0, mrope_section=(24, 20, 20))
QWEN3_MOE_DEFAULTS = replace(QWEN3_DEFAULTS, has_experts=True)


class Qwen3Attention(DecoderAttention):
    """See `DecoderAttention`."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__(config, layer_id, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def norms(self) -> HeadNorms:
        """See `DecoderAttention.norms`."""
        return HeadNorms(q_weight=self.q_norm.weight, k_weight=self.k_norm.weight, eps=self.q_norm.eps)


class Qwen3Decoder(Decoder):
    """See `Decoder`. dtype: what it computes in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        rotary = MRotary(config.head_dim, config.rope_theta, interleaved_axes(config.mrope_section), dtype)
        super().__init__(config, lambda layer_id: Qwen3Attention(config, layer_id), rotary)
