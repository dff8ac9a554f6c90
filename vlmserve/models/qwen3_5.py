"""The decoder of Qwen3.5, dense or with experts: gated delta nets, and gated attention in every fourth layer or so."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from vlmserve.models.attention.base import ForwardBatch, Projected
from vlmserve.models.config import ExpertsConfig, ModelConfig, ModelDefaults
from vlmserve.models.decoder import Decoder, DecoderAttention
from vlmserve.models.delta_net import GatedDeltaNet
from vlmserve_common.compute.activations import Activation, activation
from vlmserve_common.compute.communicator import ALONE, Communicator
from vlmserve_common.compute.experts import SparseMLP
from vlmserve_common.compute.layers import GatedMLP, ZeroCentredRMSNorm
from vlmserve_common.compute.linear import Linear, MergedLinear
from vlmserve_common.compute.rotary import MRotary, Rotation, interleaved_axes, rotate
from vlmserve_common.kernels.packed_linear import SharedMLP

QWEN3_5_DEFAULTS = ModelDefaults(
    rope_theta=10_000.0, mrope_section=(11, 11, 10), has_linear_attention=True, partial_rotary_factor=0.25
)
QWEN3_5_MOE_DEFAULTS = replace(QWEN3_5_DEFAULTS, has_experts=True)


class GatedAttention(DecoderAttention):
    """Attention whose output goes through gates that come with the queries. Only the first part of each head turns, so
    heads are normalised and turned here, and backends get a rotation by zero."""

    def __init__(self, config: ModelConfig, comm: Communicator, layer_id: int) -> None:
        super().__init__(config, comm, layer_id, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        own, shard = config.of_part(), comm.shard.attention
        self._heads, self._kv_heads = own.num_heads, own.num_kv_heads
        # a head's queries, and then its gates
        q = shard.cut_heads(config.num_heads, 2 * config.head_dim, "num_attention_heads")
        kv = shard.cut_kv(config.num_kv_heads, config.head_dim)
        self.qkv_proj = MergedLinear(
            config.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=config.attention_bias
        )
        self.q_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)

    def divide_keys(self, by: float) -> bool:
        """Return False: the norms are no plain factors."""
        return False

    def divide_values(self, by: float) -> bool:
        """Return False, so that keys and values are treated alike."""
        return False

    def forward(
        self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden], added to `residual`. rotary: of the part of a head that turns."""
        qkv, gate = self._project(x, rotary)
        attended = self.attend(x, Projected(qkv, _unturned(rotary, self.head_dim), None), rotary, forward_batch)
        return self.o_proj(attended.mul_(gate.sigmoid().flatten(1)), residual=residual)

    def attend(self, x: torch.Tensor, own: Projected, rotary: Rotation, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attend with what was projected from x [N, hidden] -> [N, heads * dim], before the gates."""
        return self.attn(own.qkv, own.rotary, own.norms, forward_batch)

    def store(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> None:
        """Write the keys and values of x [N, hidden] to the cache, and attend to nothing."""
        _, k, v = self._project(x, rotary)[0].split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        forward_batch.kv_cache.write(self.attn.layer_id, forward_batch.out_cache_loc, k, v)

    def _project(self, x: torch.Tensor, rotary: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return turned queries and keys with values [N, heads + 2 * kv_heads, dim], and gates [N, heads, dim]."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self.head_dim
        queries, kv = self.qkv_proj(x).split([2 * heads * dim, 2 * kv_heads * dim], dim=-1)
        q, gate = queries.unflatten(-1, (heads, 2 * dim)).split(dim, dim=-1)
        k, v = kv.unflatten(-1, (2 * kv_heads, dim)).split(kv_heads, dim=1)
        qk = torch.cat((self.q_norm(q.contiguous()), self.k_norm(k.contiguous())), dim=1)
        turning = rotary[0].shape[-1]
        qk[..., :turning] = rotate(qk[..., :turning], *rotary)
        return torch.cat((qk, v), dim=1), gate


def _unturned(rotary: Rotation, dim: int) -> Rotation:
    cos, _ = rotary
    shape = (len(cos), 1, dim)
    return cos.new_ones(shape), cos.new_zeros(shape)


Attention = TypeVar("Attention", bound=GatedAttention)


class SharedExpertMLP(SparseMLP):
    """A sparse MLP with one more expert, which all tokens go through, times a gate."""

    def __init__(self, size: int, experts: ExpertsConfig, act: Activation, comm: Communicator = ALONE) -> None:
        super().__init__(size, experts.intermediate_size, experts.count, experts.chosen, act, comm)
        # added up together with what the other experts make
        self.shared_expert = GatedMLP(
            size,
            experts.shared_size,
            act,
            bias=False,
            comm=comm,
            summed=False,
            what="shared_expert_intermediate_size",
        )
        self.shared_expert_gate = Linear(size, 1, bias=False)
        self.shared_expert_gate.may_be_quantised = False
        self._whole: SharedMLP | None = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `SparseMLP.forward`."""
        whole = self._native()
        if whole is None:
            return super().forward(x, residual)
        return whole(x) if residual is None else whole(x).add_(residual)

    def _native(self) -> SharedMLP | None:
        """Return what computes all of it at once, if all of it is here, packed, and changed by no adapter."""
        shared = self.shared_expert
        products = (self.gate, shared.gate_up_proj, shared.down_proj, self.shared_expert_gate)
        parts = (self.experts, *products)
        if self._exchange is not None or any(part.adapters and part.adapters[0].adapters for part in parts):
            return None
        router, *beside = [product.packed for product in products]
        if self.experts.packed is None or router is None or None in beside:
            return None
        if self._whole is None or self._whole.weights[0] is not router:
            weights = [router, *self.experts.packed, *(weight for weight in beside if weight is not None)]
            self._whole = SharedMLP(*weights, chosen=self.gate.chosen, act=self.experts.act.name)
        return self._whole

    def beside(self, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """See `SparseMLP.beside`."""
        if self._exchange is not None:
            x = self._exchange.all_tokens(x, routed)
        return self.shared_expert(x).mul_(self.shared_expert_gate(x).sigmoid())


class HybridLayer(nn.Module):
    """Pre-norm layer with a gated delta net (`linear_attn`) or attention (`self_attn`)."""

    def __init__(self, config: ModelConfig, comm: Communicator, mixer: GatedDeltaNet | GatedAttention) -> None:
        super().__init__()
        self.self_attn = mixer if isinstance(mixer, GatedAttention) else None
        self.linear_attn = mixer if isinstance(mixer, GatedDeltaNet) else None
        self.mlp = make_hybrid_mlp(config, comm)
        self.input_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden], a new tensor."""
        normed = self.input_layernorm(x)
        if self.linear_attn is not None:
            x = self.linear_attn(normed, forward_batch, residual=x)
        else:
            assert self.self_attn is not None
            x = self.self_attn(normed, rotary, forward_batch, residual=x)
        return self.mlp(self.post_attention_layernorm(x), residual=x)


def make_hybrid_mlp(config: ModelConfig, comm: Communicator) -> nn.Module:
    """Make a layer's MLP: dense, or experts, with one that all tokens go through if the configuration says so."""
    size, act, experts = config.hidden_size, activation(config.hidden_act), config.experts
    if experts is None:
        return GatedMLP(size, config.intermediate_size, act, bias=False, comm=comm)
    if not experts.shared_size:
        return SparseMLP(size, experts.intermediate_size, experts.count, experts.chosen, act, comm)
    return SharedExpertMLP(size, experts, act, comm)


def make_mixers(config: ModelConfig, comm: Communicator, attention: type[Attention]) -> list[GatedDeltaNet | Attention]:
    """Make the delta net, or else the attention, of each layer here."""
    assert config.linear is not None
    mixers: list[GatedDeltaNet | Attention] = []
    recurrent = 0
    for place, layer in enumerate(config.own_layers):
        if layer in config.linear.layers:
            mixers.append(GatedDeltaNet(config, comm, config.linear, recurrent))
            recurrent += 1
        else:
            mixers.append(attention(config, comm, place - recurrent))
    return mixers


def make_rotary(config: ModelConfig, dtype: torch.dtype) -> MRotary:
    """Make what turns the first part of each head."""
    return MRotary(config.rotary_dim, config.rope, interleaved_axes(config.mrope_section), dtype)


class Qwen3_5Decoder(Decoder):
    """A decoder of gated delta nets and gated attention. dtype: of its computation."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, comm: Communicator = ALONE) -> None:
        layers = [HybridLayer(config, comm, mixer) for mixer in make_mixers(config, comm, GatedAttention)]
        norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        super().__init__(config, comm, layers, norm, make_rotary(config, dtype))
