"""The neighbours of places, for convolutions; see `cpp/neighbours.cpp`."""

from __future__ import annotations

import torch

from vlmserve_common.kernels.library import operators


def neighbours(x: torch.Tensor, stride: int, out: torch.Tensor) -> None:
    """Write the neighbours of every `stride`-th place of x [n, *space, channels], at a distance of 1 in each of one or
    two dimensions, to the first rows of out [places or more, 3 or 9 * channels, or more]. Zeros stand for places
    outside, and fill the rows up."""
    assert x.dtype == out.dtype
    assert out.is_contiguous()
    x = x.contiguous()
    *_, columns, channels = x.shape
    rows, kernel_rows = (1, 1) if x.ndim == 3 else (x.shape[1], 3)
    size = x.element_size()
    places = len(x) * ((rows - 1) // stride + 1) * ((columns - 1) // stride + 1)
    assert len(out) >= places
    assert out.shape[1] >= 3 * kernel_rows * channels
    operators().vs_neighbours(
        x.data_ptr(),
        len(x),
        rows,
        columns,
        channels * size,
        kernel_rows,
        stride,
        out.shape[1] * size,
        out.data_ptr(),
    )
