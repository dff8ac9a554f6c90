"""Where Triton's kernels are tested: on a GPU, or on the CPU by its interpreter."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def seeded(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded_alike(found, wanted):
    """Equal, but that sums in another order may round one element of a hundred the other way. A rounding more or less
    on the way would change every fourth."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    step = torch.finfo(wanted.dtype).eps
    assert torch.allclose(
        found.double(), wanted.double(), rtol=4 * step if wanted.dtype == torch.float32 else step, atol=1e-7
    )
    if wanted.dtype != torch.float32:
        assert (found != wanted).sum() <= max(1, wanted.numel() // 100)
