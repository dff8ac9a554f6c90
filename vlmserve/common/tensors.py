"""Tensors as arrays that can be sent or stored: bfloat16, which NumPy does not have, as its bits in uint16."""

from __future__ import annotations

import numpy as np
import torch


def to_array(rows: torch.Tensor) -> tuple[np.ndarray, str]:
    """The memory of a tensor on the CPU as an array, and the name of its dtype."""
    bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
    return bits.numpy(), str(rows.dtype).removeprefix("torch.")


def from_array(array: np.ndarray, dtype: str) -> torch.Tensor:
    """What `to_array` was given, in the array's memory; a copy if that is read-only, as views of received bytes are."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(getattr(torch, dtype))
