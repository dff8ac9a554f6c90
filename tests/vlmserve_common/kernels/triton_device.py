"""Where Triton's kernels are tested: on a GPU, or on the CPU under Triton's interpreter, whose `tl.dot` is replaced."""

from __future__ import annotations

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _NumpyInOrder:
    """NumPy, with a `matmul` that adds up each element in one order, whatever the matrices' shapes.

    BLAS picks another order for another shape and another CPU. A GPU does not, so tests may compare bits.
    """

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def matmul(a, b, dtype):
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
        for k in range(a.shape[-1]):
            total += a[..., k, None] * b[..., None, k, :]
        return total


if DEVICE.type == "cpu":
    try:
        from triton.runtime import interpreter
    except ImportError:  # its tests are skipped
        pass
    else:
        interpreter.np = _NumpyInOrder()


def seeded(seed, *shape, dtype=torch.float32):
    """Make normal numbers on the device under test."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded_alike(found, wanted):
    """Assert that two tensors are equal, except that one element of a hundred may be rounded the other way.

    Sums in another order do that. A rounding more or less on the way would change every fourth element. An element that
    is the small difference of two large numbers has their error, so the largest element sets the limit, too.
    """
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    step = torch.finfo(wanted.dtype).eps
    relative = 4 * step if wanted.dtype == torch.float32 else step
    absolute = step * wanted.abs().max().item() if wanted.numel() else 0
    assert torch.allclose(found.double(), wanted.double(), rtol=relative, atol=absolute)
    if wanted.dtype != torch.float32:
        assert (found != wanted).sum() <= max(1, wanted.numel() // 100)
