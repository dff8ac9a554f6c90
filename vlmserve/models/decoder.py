"""The text decoder that the families share; they bring their own attention layer and rotary positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vlmserve.attention.base import ForwardBatch, RadixAttention
from vlmserve.models.config import ModelConfig
from vlmserve.models.rotary import MRotary
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.layers import Embedding, GatedMLP, RMSNorm
from vlmserve_common.compute.linear import Linear, MergedLinear

Rotation = tuple[torch.Tensor, torch.Tensor]


class DecoderAttention(nn.Module):
    """Grouped-query attention over the KV cache. Subclasses say what happens to q and k: `position`."""

    def __init__(self, config: ModelConfig, layer_id: int, *, qkv_bias: bool, out_bias: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias=qkv_bias
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=out_bias)
        self.attn = RadixAttention(
            config.num_heads, config.head_dim, config.head_dim**-0.5, config.num_kv_heads, layer_id
        )

    def position(self, qk: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        """Normalise (where the family does) and turn qk [N, num_heads + num_kv_heads, head_dim]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).view(len(x), heads + 2 * kv_heads, self.head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        q, k = self.position(qk, rotary).split([heads, kv_heads], dim=1)
        return self.o_proj(self.attn(q, k, v, forward_batch))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, self_attn: DecoderAttention) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation(config.hidden_act), bias=False)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden], a new tensor."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, forward_batch)
        return x.add_(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    make_attention: layer index -> its attention. rotary: positions -> what the attention layers turn by.
    """

    def __init__(self, config: ModelConfig, make_attention: Callable[[int], DecoderAttention], rotary: MRotary) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, make_attention(i)) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = rotary

    def forward(
        self,
        input_embeds: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        deepstack_index: torch.Tensor | None = None,
        deepstack_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_embeds [N, hidden], positions int64 [3, N] -> final normalised hidden states [N, hidden].

        deepstack_embeds [layers, R, hidden] are added to tokens `deepstack_index` int64 [R] behind the first layers
        (DeepStack, arXiv:2406.04334).
        """
        rotary = self._rotary(positions)
        x = input_embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, forward_batch)
            if deepstack_embeds is not None and index < len(deepstack_embeds):
                x.index_add_(0, deepstack_index, deepstack_embeds[index])
        return self.norm(x)
