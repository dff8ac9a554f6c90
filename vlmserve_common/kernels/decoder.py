"""A decoder's layers in one call; see `cpp/decoder.cpp`, whose structs are those of this file."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Protocol

import torch

from vlmserve_common.kernels.attention import CACHE_KINDS, CacheLayer, HeadNorms
from vlmserve_common.kernels.library import operators, pointer
from vlmserve_common.kernels.packed_linear import ACTS, PackedWeight, WeightStruct, experts_scratch, weight_struct


@dataclass(frozen=True, kw_only=True)
class MLPWeights:
    """Two products, the first gated; or of a sparse MLP those of its experts from number `first` on, as many as are
    here, of which its router gives each token `chosen`."""

    gate_up: PackedWeight
    down: PackedWeight
    router: PackedWeight | None = None
    chosen: int = 0
    first: int = 0

    @property
    def scratch(self) -> int:
        """Elements of memory that the library needs for each token."""
        if self.router is None:
            return self.gate_up.outputs
        return self.router.outputs + self.chosen * (1 + experts_scratch(self.gate_up))


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """A layer: norms [hidden] in front of attention and MLP, and its products. window: see
    `kernels.attention.attend`."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    head_norms: HeadNorms | None
    qkv: PackedWeight
    out: PackedWeight
    mlp: MLPWeights
    window: int = 0


class Sums(Protocol):
    """Sums in shared memory over the ranks, each of which has a part of every layer; see `cpp/exchange.cpp`."""

    @property
    def address(self) -> int:
        """The address of the library's `Group`."""

    def noted(self, lost: int, sums: int, nbytes: int) -> None:
        """Count sums that the library has made: `sums` tensors of `nbytes`. lost: its result; RankLostError unless
        0."""


class LayerAdapters(Protocol):
    """What adapters add to the products of all layers."""

    def of_step(self) -> tuple[int | None, int | None, int]:
        """Return the addresses of int32 [N], the number of each row's adapter or -1, and of `FactorsStruct`s [layers,
        4, adapters], of qkv, out, gate_up and down; and the number of adapters. They last until the next step."""


class CacheTable:
    """The addresses of all layers' caches, for the library. It keeps the tensors alive."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        self._layers = tuple(layers)
        self.kind = CACHE_KINDS[layers[0].keys.dtype]
        self.structs = (_Cache * len(layers))(*(_Cache(*layer.pointers) for layer in layers))


@dataclass(frozen=True, kw_only=True)
class DecoderStep:
    """A step over N tokens. cos, sin: of `compute.rotary.rotation`; slots: int64 [N]; window_slots, window_table: those
    of layers with windows, of the same shapes; the rest: see `kernels.attention.attend`."""

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor
    table: torch.Tensor
    window_slots: torch.Tensor
    window_table: torch.Tensor
    caches: CacheTable


class DecoderLayers:
    """The layers of a decoder whose weights are all packed. The tensors stay as long as this does. sums: of a part of
    each layer. eps: of all norms; scale: what scores are multiplied by; act: its name. adapters: what those of a step
    add, if there may be any."""

    adapters: LayerAdapters | None = None

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        sums: Sums | None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        act: str,
    ) -> None:
        self._layers, self._sums = tuple(layers), sums
        first = layers[0]
        self._dtype, self._hidden = first.qkv.dtype, first.qkv.inner
        # of a token, see decoder.cpp
        self._scratch = self._hidden + max(
            first.qkv.outputs + first.out.inner, *(layer.mlp.scratch for layer in layers)
        )
        self._structs = (_Layer * len(layers))(*map(_layer, layers))
        self._decoder = _Decoder(
            ctypes.addressof(self._structs),
            self._hidden,
            heads,
            kv_heads,
            head_dim,
            eps,
            scale,
            int(self._dtype == torch.bfloat16),
            ACTS[act],
            None if sums is None else sums.address,
        )

    def run(self, x: torch.Tensor, first: int, last: int, step: DecoderStep) -> None:
        """Layers first .. last - 1 of x [N, hidden], contiguous and of the weights' dtype, in place. RankLostError
        if another rank of the group is gone."""
        assert x.shape == (len(step.slots), self._hidden)
        assert x.dtype == self._dtype
        assert x.is_contiguous()
        scratch = torch.empty(x.shape[0] * self._scratch, dtype=x.dtype)
        adapted = (None, None, 0) if self.adapters is None else self.adapters.of_step()
        passed = _Step(
            x.shape[0],
            step.requests.shape[0],
            step.cos.data_ptr(),
            step.sin.data_ptr(),
            step.slots.data_ptr(),
            step.requests.data_ptr(),
            step.table.data_ptr(),
            step.table.stride(0),
            step.window_slots.data_ptr(),
            step.window_table.data_ptr(),
            ctypes.addressof(step.caches.structs),
            int(step.cos.dtype == torch.bfloat16),
            step.caches.kind,
            *adapted,
        )
        lost = operators().vs_decoder_layers(
            ctypes.byref(self._decoder), ctypes.byref(passed), first, last, x.data_ptr(), scratch.data_ptr()
        )
        if self._sums is not None:
            self._sums.noted(lost, 2 * (last - first), x.nbytes)


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", WeightStruct),
        ("out", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("router", WeightStruct),
        ("experts", c_int64),
        ("chosen", c_int64),
        ("first", c_int64),
        ("here", c_int64),
        ("window", c_int64),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("key_scales", c_void_p), ("value_scales", c_void_p)]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("narrow", c_int32),
        ("act", c_int32),
        ("group", c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("tokens", c_int64),
        ("requests", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slots", c_void_p),
        ("plan", c_void_p),
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("window_slots", c_void_p),
        ("window_table", c_void_p),
        ("caches", c_void_p),
        ("narrow_turns", c_int32),
        ("cache_kind", c_int32),
        ("of_row", c_void_p),
        ("factors", c_void_p),
        ("adapters", c_int64),
    ]


def _layer(layer: LayerWeights) -> _Layer:
    norms, mlp = layer.head_norms, layer.mlp
    return _Layer(
        layer.attention_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        pointer(norms.q_weight if norms else None),
        pointer(norms.k_weight if norms else None),
        weight_struct(layer.qkv),
        weight_struct(layer.out),
        weight_struct(mlp.gate_up),
        weight_struct(mlp.down),
        WeightStruct() if mlp.router is None else weight_struct(mlp.router),
        0 if mlp.router is None else mlp.router.outputs,
        mlp.chosen,
        mlp.first,
        mlp.gate_up.count,
        layer.window,
    )
