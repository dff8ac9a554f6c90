"""Norms and the largest element of rows; see `cpp/norm.cpp`, `cpp/layer_norm.cpp` and `cpp/argmax.cpp`."""

from __future__ import annotations

import torch

from vlmserve_common.kernels.library import active, operators


def can_normalise(x: torch.Tensor) -> bool:
    """Whether the library is there for x [..., size]."""
    return active() is not None and x.is_cpu and x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] / rms(x) * weight [size], all of one dtype, rounded once."""
    return _normalise("vs_rms_norm", x, (weight,), eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x [..., size] - mean) / deviation * weight [size] + bias [size], all of one dtype, rounded once."""
    return _normalise("vs_layer_norm", x, (weight, bias), eps)


def _normalise(name: str, x: torch.Tensor, parameters: tuple[torch.Tensor, ...], eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    size = x.shape[-1]
    getattr(operators(), name)(
        int(x.dtype == torch.bfloat16),
        x.data_ptr(),
        *(parameter.data_ptr() for parameter in parameters),
        x.numel() // size,
        size,
        eps,
        out.data_ptr(),
    )
    return out


def argmax(x: torch.Tensor) -> torch.Tensor:
    """x [rows, size] without NaN -> int64 [rows]: where each row's largest is, the first of equals."""
    lib = active()
    if lib is None or not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous():
        return x.argmax(dim=-1)
    out = torch.empty(len(x), dtype=torch.int64)
    lib.vs_argmax(x.data_ptr(), len(x), x.shape[1], out.data_ptr())
    return out
