"""The decoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, the last one dense or with experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from vlmserve.models.config import ModelConfig, ModelDefaults
from vlmserve.models.decoder import Decoder, DecoderAttention, DecoderLayer, make_mlp
from vlmserve_common.compute.communicator import ALONE, Communicator
from vlmserve_common.compute.layers import RMSNorm
from vlmserve_common.compute.rotary import MRotary, contiguous_axes, interleaved_axes
from vlmserve_common.kernels.attention import HeadNorms

QWEN2_DEFAULTS = ModelDefaults(rope_theta=1_000_000.0, mrope_section=(16, 24, 24), has_windows=True)
QWEN3_DEFAULTS = ModelDefaults(rope_theta=500_000.0, mrope_section=(24, 20, 20))
TEXT_DEFAULTS = ModelDefaults(rope_theta=10_000.0, has_windows=True)
TEXT_MOE_DEFAULTS = replace(TEXT_DEFAULTS, has_experts=True, norm_topk_prob=False, has_windows=False)
QWEN3_MOE_DEFAULTS = replace(QWEN3_DEFAULTS, has_experts=True)


class Qwen2Attention(DecoderAttention):
    """Attention with biased projections of queries, keys and values."""

    def __init__(self, config: ModelConfig, comm: Communicator, layer_id: int) -> None:
        super().__init__(config, comm, layer_id, qkv_bias=True, out_bias=False)


class Qwen3Attention(DecoderAttention):
    """Attention that normalises each head of queries and keys."""

    def __init__(self, config: ModelConfig, comm: Communicator, layer_id: int) -> None:
        super().__init__(config, comm, layer_id, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def norms(self) -> HeadNorms:
        """Return the norms of queries and keys."""
        return HeadNorms(q_weight=self.q_norm.weight, k_weight=self.k_norm.weight, eps=self.q_norm.eps)


class _QwenDecoder(Decoder):
    """A decoder whose layers all have attention. dtype: of its computation."""

    attention: type[Qwen2Attention] | type[Qwen3Attention]
    axes: staticmethod[[tuple[int, int, int]], torch.Tensor]

    def __init__(self, config: ModelConfig, dtype: torch.dtype, comm: Communicator = ALONE) -> None:
        own = config.own_layers
        layers = (
            DecoderLayer(config, self.attention(config, comm, i - own.start), make_mlp(config, comm, i)) for i in own
        )
        rotary = MRotary(config.head_dim, config.rope, self.axes(config.mrope_section), dtype)
        super().__init__(config, comm, layers, RMSNorm(config.hidden_size, config.rms_norm_eps), rotary)


class Qwen2Decoder(_QwenDecoder):
    """A decoder whose M-RoPE gives each axis a run of frequencies."""

    attention = Qwen2Attention
    axes = staticmethod(contiguous_axes)


class Qwen3Decoder(_QwenDecoder):
    """A decoder whose M-RoPE interleaves the axes' frequencies."""

    attention = Qwen3Attention
    axes = staticmethod(interleaved_axes)
