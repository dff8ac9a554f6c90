"""The KV cache tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from vlmserve_common.kernels.attention import CacheLayer
from vlmserve_common.kernels.decoder import CacheTable

_EIGHT_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_MOST_FP8 = 448.0


def cache_dtype(setting: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the cache's dtype for a --kv-cache-dtype; auto is the dtype that the model computes in."""
    return _EIGHT_BITS.get(setting, model_dtype)


class KVShape(NamedTuple):
    """One token's keys in one layer; its values have the same shape."""

    num_kv_heads: int
    head_dim: int

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values."""
        scale = torch.float32.itemsize if dtype == torch.int8 else 0
        return 2 * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale)


class KVCache:
    """Keys and values of every layer by slot: per layer [num_slots, num_kv_heads, head_dim], page-major.

    A run of consecutive slots is a plain slice of these tensors, so attention reads a request's history without
    gathering it. Memory is cleared at the start, which commits it, so a server that starts does not run out of it
    later.

    dtype float8_e4m3fn: values beyond 448 become 448. int8: each token's head is divided by a float of its own, so that
    its largest element becomes 127.

    further: shapes of layers behind those of the model, which guess (see `models.eagle`). windowed: layers that have
    window_slots slots instead (see `WindowPool`).
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        further: Sequence[KVShape] = (),
        windowed: Collection[int] = (),
        window_slots: int = 0,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def scales(slots: int, heads: int) -> torch.Tensor | None:
            return zeros(slots, heads, dtype=torch.float32) if dtype == torch.int8 else None

        def layer(slots: int, shape: KVShape) -> CacheLayer:
            return CacheLayer(
                keys=zeros(slots, *shape, dtype=dtype),
                values=zeros(slots, *shape, dtype=dtype),
                key_scales=scales(slots, shape.num_kv_heads),
                value_scales=scales(slots, shape.num_kv_heads),
            )

        self.dtype, self.window_slots = dtype, window_slots
        own = KVShape(num_kv_heads, head_dim)
        self.layers = [
            *(layer(window_slots if number in windowed else num_slots, own) for number in range(num_layers)),
            *(layer(num_slots, shape) for shape in further),
        ]

    def behind(self, layers: int) -> KVCache:
        """Return the same cache without its first layers."""
        other = copy.copy(self)
        other.layers = self.layers[layers:]
        other.__dict__.pop("table", None)
        return other

    @functools.cached_property
    def table(self) -> CacheTable:
        """The places of all layers, for operators that take them at once."""
        return CacheTable(self.layers)

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of one slot over all layers."""
        return num_layers * KVShape(num_kv_heads, head_dim).nbytes(dtype)

    def write(
        self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k, v [N, num_kv_heads, head_dim] at slots int64 [N], and return them as they will be read."""
        layer = self.layers[layer_id]
        return (
            _write(layer.keys, layer.key_scales, slots, k),
            _write(layer.values, layer.value_scales, slots, v),
        )

    def read(self, layer_id: int, slots: torch.Tensor | slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [n, num_kv_heads, head_dim] of slots int64 [n], in the cache's own memory if
        possible."""
        layer = self.layers[layer_id]
        return (
            _read(layer.keys[slots], None if layer.key_scales is None else layer.key_scales[slots], dtype),
            _read(layer.values[slots], None if layer.value_scales is None else layer.value_scales[slots], dtype),
        )


def _write(to: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if to.dtype == x.dtype:
        to.index_copy_(0, slots, x)
        return x
    if scales is None:
        stored = x.clamp(-_MOST_FP8, _MOST_FP8).to(to.dtype)
        to.view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))
        return _read(stored, None, x.dtype)
    scale = x.float().abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1)
    stored = (x.float() / scale[..., None]).round().to(to.dtype)
    to.index_copy_(0, slots, stored)
    scales.index_copy_(0, slots, scale)
    return _read(stored, scale, x.dtype)


def _read(stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if stored.dtype == dtype:
        return stored
    return stored.to(dtype) if scales is None else (stored.float() * scales[..., None]).to(dtype)
