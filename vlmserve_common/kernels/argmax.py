"""The largest of each row; see `cpp/argmax.cpp`."""

from __future__ import annotations

import torch

from vlmserve_common.kernels.library import active


def argmax(x: torch.Tensor) -> torch.Tensor:
    """x [rows, size] without NaN -> int64 [rows]: where each row's largest is, the first of equals."""
    lib = active()
    if lib is None or not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous():
        return x.argmax(dim=-1)
    out = torch.empty(len(x), dtype=torch.int64)
    lib.vs_argmax(x.data_ptr(), len(x), x.shape[1], out.data_ptr())
    return out
