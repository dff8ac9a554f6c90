"""Attention inside segments of a packed batch; see `cpp/segment_attention.cpp`."""

from __future__ import annotations

import torch

from vlmserve_common.kernels.library import active

_LARGEST_DIM = 128


def can_attend(qkv: torch.Tensor) -> bool:
    """Whether the library is there for queries, keys and values [P, 3, heads, dim]."""
    dim = qkv.shape[-1]
    supported = qkv.dtype in (torch.bfloat16, torch.float32) and dim % 2 == 0 and dim <= _LARGEST_DIM
    return active() is not None and qkv.is_cpu and supported


def segment_attention(
    qkv: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Turn queries and keys by their positions, and attend inside segments; scores are divided by sqrt(dim).

    qkv [P, 3, heads, dim]; cos and signed sin (`compute.rotary.rotation`) float32 [P, 1, dim]; bounds int64 [segments +
    1]: where segments begin, and P. Returns [P, heads, dim] in the dtype of qkv. What a patch gets depends on its own
    segment only, bit for bit.
    """
    lib = active()
    assert lib is not None
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert signed_sin.is_contiguous()
    count, _, heads, dim = qkv.shape
    out = qkv.new_empty((count, heads, dim))
    lib.vs_segment_attention(
        int(qkv.dtype == torch.bfloat16),
        qkv.data_ptr(),
        cos.data_ptr(),
        signed_sin.data_ptr(),
        heads,
        dim,
        bounds.data_ptr(),
        len(bounds) - 1,
        out.data_ptr(),
    )
    return out
