"""Whether a GPU runs the kernels for attention inside segments: tried once, on a few patches."""

from __future__ import annotations

import functools
import logging

import torch
from torch.nn import functional as F

log = logging.getLogger(__name__)


@functools.cache
def gpu_kernels_work(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """For such a tensor. Where they do not, a line in the log says why; torch is to attend, then, and is slower."""
    try:
        apart = trial(device, dtype, dim)
    except Exception as error:  # whatever a compiler, a driver or a missing package raises
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    else:
        if apart < 0.05:
            return True
        why = f"its kernels are wrong on this device, by {apart:.3g}"
    log.warning("vision attention by torch on %s, not by Triton: %s", device, why)
    return False


def trial(device: torch.device, dtype: torch.dtype, dim: int) -> float:
    """The largest difference to torch's attention in float32, over two segments of normal numbers; inf for NaN."""
    from vlmserve_common.kernels.gpu.segments import segment_attention, tile_rows, turn

    lengths = (70, 5)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 2, dim, generator=generator).to(device, dtype)
    unturned = torch.zeros(sum(lengths), 1, dim, device=device)
    rows = tile_rows(dtype, max(lengths))
    tiles = [[0, 70, first] for first in range(0, 70, rows)] + [[70, 75, 70]]
    wanted = torch.cat([_by_torch(part.float()) for part in qkv.split(lengths)])
    turn(qkv, unturned + 1, unturned)
    found = segment_attention(qkv, torch.tensor(tiles, dtype=torch.int32, device=device), rows)
    return float((found.float() - wanted).abs().max().nan_to_num(torch.inf))


def _by_torch(segment: torch.Tensor) -> torch.Tensor:
    """[length, 3, heads, dim] -> [length, heads, dim]."""
    q, k, v = segment.permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)
