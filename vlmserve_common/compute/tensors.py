"""Dtypes by name; memory for modules; tensors as arrays that can be sent: bfloat16, which NumPy lacks, as uint16."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in settings and checkpoints: "bfloat16", "float32" ..."""
    return str(dtype).removeprefix("torch.")


def dtype_setting(name: str) -> torch.dtype | None:
    """Return the dtype of a `--dtype`; None for "auto", the checkpoint's own."""
    found: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    return found


def to_array(rows: torch.Tensor) -> tuple[np.ndarray, str]:
    """Return the memory of a tensor on the CPU as an array, and the name of its dtype."""
    bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
    return bits.numpy(), dtype_name(rows.dtype)


def from_array(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return the tensor that `to_array` was given, in the array's memory; a copy if that is read-only, as views of
    received bytes are."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(getattr(torch, dtype))


def give_memory(module: nn.Module, device: torch.device | str) -> None:
    """Move a module from the meta device to another, its tensors uninitialised: `Module.to_empty`, which imports
    torch's compiler for that, half a second."""
    module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
