"""Which attention a server gets."""

from __future__ import annotations

from typing import Literal

import torch

from vlmserve.attention.base import AttentionBackend
from vlmserve.attention.native_backend import NativeAttentionBackend
from vlmserve.attention.torch_backend import TorchAttentionBackend
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.attention import can_attend


def choose_backend(
    setting: Literal["auto", "native", "torch"],
    *,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
) -> AttentionBackend:
    """auto: our own where it is possible. EngineError if it was asked for and is not."""
    possible = device.type == "cpu" and can_attend(dtype, cache_dtype, head_dim)
    if setting == "native" and not possible:
        raise EngineError(
            f"--attention-backend native needs our own operators (--cpu-kernels) on a CPU, float32 or bfloat16, and "
            f"heads of 16, 32 ... 256 elements; here it is {device}, {dtype_name(dtype)} and {head_dim}"
        )
    return NativeAttentionBackend() if possible and setting != "torch" else TorchAttentionBackend()
