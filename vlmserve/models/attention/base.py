"""What decoder layers and attention kernels share: one step's tensors, and how the two call each other."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentStep
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.kernels.attention import HeadNorms
from vlmserve_common.kernels.decoder import DecoderLayers

# (x [N, hidden], first, last) -> x behind layers first .. last - 1; x may be overwritten.
RunLayers = Callable[[torch.Tensor, int, int], torch.Tensor]


class ForwardMode(enum.IntEnum):
    """EXTEND: prompt chunks. DECODE: one token a request. MIXED: both (decoding is an extend of length one)."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Device tensors of one forward pass over N tokens of B requests, tokens of a request side by side.

    input_ids int64 [N]; positions int64 [3, N] (M-RoPE: time, height, width); req_pool_indices int64 [B]; seq_lens
    int32 [B]: tokens of each request, those of this step included; extend_start_loc int32 [B + 1]: where the tokens of
    each request begin in the batch, and N; prefix_lens / extend_lens: host lists of length B, tokens before and of this
    step; out_cache_loc int64 [N]: the KV slot each token is written to. recurrent: the states of recurrent layers; None
    for models without any.
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
    recurrent: RecurrentStep | None = None


class RadixAttention(nn.Module):
    """A decoder layer's attention over the paged KV cache; owns no weights."""

    def __init__(self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scaling = scaling
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id

    def forward(
        self, qkv: torch.Tensor, rotary: Rotation, norms: HeadNorms | None, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        return forward_batch.attn_backend.forward(qkv, rotary, norms, self, forward_batch)


class AttentionBackend(ABC):
    """Gives queries and keys their positions, writes this step's K/V into the cache and attends over it.

    can_capture: whether decoding by it can be captured in a CUDA graph, for which it has the two hooks.
    """

    can_capture: bool = False

    def reserve(self, max_requests: int, max_context_len: int) -> None:  # noqa: B027  many keep nothing
        """Allocate now what steps of so many requests, each of up to so many tokens, keep from one to the next: what
        is left of the memory is given away after this."""

    def init_graph_state(self, max_batch_size: int, req_to_token_pool: ReqToTokenPool) -> None:
        """Make the buffers that captured kernels read and write, before the first capture; again where other graphs
        take the place of all before, over another pool and KV cache."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def init_graph_metadata(self, forward_batch: ForwardBatch) -> None:
        """`init_forward_metadata` of a decode step, into the buffers of `init_graph_state`; called before a capture and
        before every replay, with the same tensors, whose values are this step's."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Work done once a step, before the first layer."""

    @abstractmethod
    def forward(
        self,
        qkv: torch.Tensor,
        rotary: Rotation,
        norms: HeadNorms | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """qkv [N, num_heads + 2 * num_kv_heads, head_dim], which may be overwritten -> [N, num_heads * head_dim].

        Any number of tokens a request, causal over prefix + extend. norms: where the model normalises heads.
        """

    def whole_layers(self, layers: DecoderLayers, rotary: Rotation, forward_batch: ForwardBatch) -> RunLayers | None:
        """What computes a step's layers as a whole, attention included; None: the decoder does, by `forward`."""
        return None
