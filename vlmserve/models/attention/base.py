"""The interface between decoder layers and attention backends, and the tensors of one step."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentStep
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve_common.compute.layers import rms_normalise
from vlmserve_common.compute.rotary import Rotation, rotate
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.attention import HeadNorms
from vlmserve_common.kernels.decoder import DecoderLayers

if TYPE_CHECKING:
    from vlmserve.models.qwen4_exp.sparse import BlockPlan

_GATHERED = 1 << 22
"""The elements of keys that a step's tokens gather at a time, if each attends to slots of its own."""

# (x [N, hidden], first, last) -> x behind layers first .. last - 1; x may be overwritten.
RunLayers = Callable[[torch.Tensor, int, int], torch.Tensor]


class ForwardMode(enum.IntEnum):
    """EXTEND: prompt chunks. DECODE: one token a request. MIXED: both (decoding is an extend of length one)."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What an attention backend is made for: a decoder's heads, and the cache that keeps them. dtype: of queries.
    windows: whether some layers have any."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page_size: int
    device: torch.device
    windows: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads}"
        return f"{heads}, {dtype_name(self.dtype)}, cache of {dtype_name(self.cache_dtype)}"


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Device tensors of one forward pass over N tokens of B requests, tokens of a request side by side.

    input_ids int64 [N]. positions int64 [3, N] (M-RoPE: time, height, width). req_pool_indices int64 [B]. seq_lens
    int32 [B]: tokens of each request, with this step's. extend_start_loc int32 [B + 1]: where the tokens of each
    request begin in the batch, and N. prefix_lens, extend_lens: host lists of length B, tokens before and of this step.
    out_cache_loc int64 [N]: the KV slot each token is written to. window_cache_loc: the same of layers with windows,
    None unless these have slots of their own. recurrent: the states of recurrent layers; None for
    models without any. tapped [layers, N, streams * hidden]: the input of layers that `Decoder.tap` names; None makes
    room as the decoder computes. ngrams, blocks: what layers of Qwen4Exp need of the step, made by their decoder.
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    extend_start_loc: torch.Tensor
    prefix_lens: list[int]
    extend_lens: list[int]
    out_cache_loc: torch.Tensor
    req_to_token_pool: ReqToTokenPool
    kv_cache: KVCache
    attn_backend: AttentionBackend
    window_cache_loc: torch.Tensor | None = None
    recurrent: RecurrentStep | None = None
    tapped: torch.Tensor | None = None
    ngrams: torch.Tensor | None = None
    blocks: BlockPlan | None = None

    def slots_of(self, *, windowed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots that layers with windows, or the others, write to, int64 [N]; and their table of the slots
        of all tokens, int32 [rows, most]."""
        pool = self.req_to_token_pool
        if windowed and self.window_cache_loc is not None:
            assert pool.window_table is not None, "slots of layers with windows, and no table"
            return self.window_cache_loc, pool.window_table
        return self.out_cache_loc, pool.req_to_token


@dataclass(frozen=True, slots=True)
class Projected:
    """A layer's queries, keys and values, not turned yet.

    qkv: [N, num_heads + 2 * num_kv_heads, head_dim]; may be overwritten. norms: of the heads, if the model normalises
    them before they are turned.
    """

    qkv: torch.Tensor
    rotary: Rotation
    norms: HeadNorms | None


class RadixAttention(nn.Module):
    """A decoder layer's attention over the paged KV cache; owns no weights. window: the tokens that a token sees, the
    last of them itself; 0: all before it."""

    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int, *, window: int = 0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scaling = scaling
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.window = window

    def forward(
        self, qkv: torch.Tensor, rotary: Rotation, norms: HeadNorms | None, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend over the cache, by the step's backend."""
        return forward_batch.attn_backend.forward(Projected(qkv, rotary, norms), self, forward_batch)


class AttentionBackend(ABC):
    """An implementation of attention: it turns queries and keys, writes keys and values to the cache, and attends.

    can_capture: whether its decode steps can be captured in a CUDA graph; it has the two graph hooks then.
    """

    can_capture: bool = False

    def reserve(self, max_requests: int, max_context_len: int) -> None:  # noqa: B027  many keep nothing
        """Allocate the buffers that steps of up to `max_requests` requests of `max_context_len` tokens each keep. The
        KV cache gets the rest of the memory afterwards."""

    def init_graph_state(self, max_batch_size: int, req_to_token_pool: ReqToTokenPool) -> None:
        """Make the buffers that captured kernels read and write. Called before the first capture, and again when graphs
        over another pool and KV cache replace all earlier ones."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def init_graph_metadata(self, forward_batch: ForwardBatch) -> None:
        """Write a decode step's metadata to the buffers of `init_graph_state`. Called before a capture and before every
        replay with the same tensors, which hold this step's values."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare a step; called once, before the first layer."""

    @abstractmethod
    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attend over prefix and this step's tokens, causally, for any number of tokens a request. Return [N,
        num_heads * head_dim]."""

    def attend_chosen(
        self,
        own: Projected,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        slots: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Attend with each token to the first `counts` int64 [N] of its own `slots` int32 [N, most]. There may be this
        step's tokens among them. Return [N, num_heads * head_dim]."""
        q = position_and_store(own, layer, forward_batch)
        out, most = torch.empty_like(q), slots.shape[1]
        each = max(1, _GATHERED // (most * layer.num_kv_heads * q.shape[2]))
        for first in range(0, len(q), each):
            tokens = slice(first, first + each)
            taken = slots[tokens].long()
            keys, values = forward_batch.kv_cache.read(layer.layer_id, taken.flatten(), q.dtype)
            seen = torch.arange(most, device=q.device) < counts[tokens, None]
            out[tokens] = F.scaled_dot_product_attention(
                q[tokens].unsqueeze(2),
                keys.unflatten(0, taken.shape).transpose(1, 2),
                values.unflatten(0, taken.shape).transpose(1, 2),
                attn_mask=seen[:, None, None],
                scale=layer.scaling,
                enable_gqa=True,
            ).squeeze(2)
        return out.flatten(1)

    def whole_layers(self, layers: DecoderLayers, rotary: Rotation, forward_batch: ForwardBatch) -> RunLayers | None:
        """Return a function that computes whole layers, attention included. None if the decoder must call `forward`."""
        return None


def position_and_store(own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
    """Return the turned queries [N, num_heads, head_dim]; write the turned keys, and the values, to the KV cache."""
    if fused.usable(own.qkv):
        from vlmserve_common.kernels.gpu import positions  # not where there is no GPU

        cache = forward_batch.kv_cache.layers[layer.layer_id]
        if positions.can_store(own.qkv, cache):
            return positions.position_and_store(own.qkv, own.rotary, own.norms, forward_batch.out_cache_loc, cache)
    q, k, v = positioned(own, layer.num_kv_heads)
    forward_batch.kv_cache.write(layer.layer_id, forward_batch.out_cache_loc, k, v)
    return q


def positioned(own: Projected, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [N, num_heads, head_dim], k and v [N, num_kv_heads, head_dim], computed with torch. q and k are turned,
    and normalised before if the model does that."""
    num_heads = own.qkv.shape[1] - 2 * num_kv_heads
    qk, v = own.qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if own.norms is not None:
        qk = rms_normalise(qk, own.norms.eps)
        qk[:, :num_heads].mul_(own.norms.q_weight)
        qk[:, num_heads:].mul_(own.norms.k_weight)
    q, k = rotate(qk, *own.rotary).split([num_heads, num_kv_heads], dim=1)
    return q, k, v
