"""One token of gated delta nets; see `cpp/delta_step.cpp`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from vlmserve_common.kernels.library import active, operators

_MOST_DIM = 256


@dataclass(frozen=True, kw_only=True)
class DeltaWeights:
    """The weights of a net beside its products, all of one dtype: conv [channels, width], a_log, dt_bias [value_heads],
    norm [value_dim]. sigmoid_gate: False for SiLU."""

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    sigmoid_gate: bool
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class _Step(ctypes.Structure):
    """`Step` of delta_step.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mixed", "gate", "b", "a", "tokens", "states")),
        *((name, ctypes.c_void_p) for name in ("conv_weight", "a_log", "dt_bias", "norm", "conv", "recurrent", "out")),
        *((name, ctypes.c_int64) for name in ("count", "mixed_stride", "gate_stride", "ba_stride")),
        *((name, ctypes.c_int64) for name in ("conv_stride", "state_stride")),
        *((name, ctypes.c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "width")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("narrow", "sigmoid_gate")),
    )


def can_step(mixed: torch.Tensor, key_dim: int, value_dim: int) -> bool:
    """Whether the library is there for such inputs and heads."""
    known = mixed.dtype in (torch.float32, torch.bfloat16)
    return active() is not None and mixed.is_cpu and known and max(key_dim, value_dim) <= _MOST_DIM


def delta_step(
    mixed: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    states: torch.Tensor,
    tokens: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute one token of each of n requests, from the convolution to the gated norm, and update their states.

    mixed [N, channels], gate [N, value_heads * value_dim], b, a [N, value_heads]: what the net's products made; rows
    are contiguous. conv [states, width - 1, channels], recurrent float32 [states, value_heads, key_dim, value_dim]: of
    one layer; states lie apart by any stride. states int64 [n]: distinct. tokens int64 [n]: rows of the batch; None:
    all. out [N, value_heads * value_dim]: written at these rows.
    """
    assert b.stride(0) == a.stride(0)
    step = _Step(
        *(x.data_ptr() for x in (mixed, gate, b, a)),
        None if tokens is None else tokens.data_ptr(),
        states.data_ptr(),
        *(x.data_ptr() for x in (weights.conv, weights.a_log, weights.dt_bias, weights.norm, conv, recurrent, out)),
        len(states),
        mixed.stride(0),
        gate.stride(0),
        b.stride(0),
        conv.stride(0),
        recurrent.stride(0),
        weights.key_heads,
        weights.value_heads,
        weights.key_dim,
        weights.value_dim,
        weights.conv.shape[1],
        weights.eps,
        int(mixed.dtype == torch.bfloat16),
        int(weights.sigmoid_gate),
    )
    operators().vs_delta_step(ctypes.addressof(step))
