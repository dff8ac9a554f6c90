"""The choice between the GPU's fused operators (`kernels.gpu`) and torch's. The composition root makes it once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional as F

from vlmserve_common.errors import EngineError, first_line

log = logging.getLogger(__name__)

Choice = Literal["auto", "triton", "torch"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DELTA_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_device_type: str | None = None


def activate(choice: Choice, device: torch.device) -> str:
    """Use the fused operators on `device` from now on, if a trial of one of them succeeds. Returns a text for people.

    auto: torch's operators on a CPU, and after a failed trial. triton: EngineError after a failed trial; on a CPU the
    operators run under Triton's interpreter. torch: torch's operators.
    """
    global _device_type
    _device_type = None
    if choice == "torch":
        return "torch's operators (--gpu-kernels torch)"
    if choice == "auto" and device.type == "cpu":
        return "torch's operators"
    problem = _trial(device)
    if not problem:
        _device_type = device.type
        return "fused operators in Triton"
    if choice == "triton":
        raise EngineError(f"--gpu-kernels triton: the operators cannot be used on {device}: {problem}")
    return f"torch's operators, which are slower: those in Triton cannot be used: {problem}"


def active_on(device: torch.device) -> bool:
    """Whether the fused operators are active on a device."""
    return device.type == _device_type


def usable(x: torch.Tensor) -> bool:
    """Whether a fused operator may take x: contiguous, in a dtype that they know, and where they are active."""
    return _takes(x) and x.is_contiguous()


def _takes(x: torch.Tensor) -> bool:
    return active_on(x.device) and x.dtype in _DTYPES


def runs_delta_nets(x: torch.Tensor, key_dim: int, value_dim: int) -> bool:
    """Whether gated delta nets are computed by Triton's kernels, for inputs like x and heads of these sizes."""
    return _takes(x) and delta_kernels_work(x.device, x.dtype, key_dim, value_dim)


def _trial(device: torch.device) -> str:
    """Try an operator; return the problem in a line, or ""."""
    try:
        from vlmserve_common.kernels.gpu.norm import rms_norm

        with torch.inference_mode():
            found = rms_norm(torch.full((2, 48), 3.0, device=device), torch.full((48,), 0.5, device=device), 0.0)
            right = bool((found - 0.5).abs().max() < 1e-6)
    except Exception as error:  # of the import, the compiler or the driver: whatever it is, torch computes then
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if right else "RMSNorm of equal elements is not their weights"


@functools.cache
def gpu_kernels_work(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Try the kernels of attention inside segments for such tensors. If they fail, a line in the log says why."""
    return _work("vision attention", device, 0.05, lambda: trial(device, dtype, dim))


@functools.cache
def delta_kernels_work(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Try the kernels of gated delta nets for such heads. If they fail, a line in the log says why."""

    def run() -> float:
        from vlmserve_common.kernels.gpu import delta_trial

        return delta_trial.trial(device, dtype, key_dim, value_dim)

    return _work("gated delta nets", device, _DELTA_TOLERANCE[dtype], run)


def _work(what: str, device: torch.device, most: float, run: Callable[[], float]) -> bool:
    """Return True if a trial is off by less than `most`. If not, a line in the log says why."""
    try:
        apart = run()
    except Exception as error:  # whatever a compiler, a driver or a missing package raises
        why = f"{type(error).__name__}: {first_line(error)}"
    else:
        if apart < most:
            return True
        why = f"its kernels are wrong on this device, by {apart:.3g}"
    log.warning("%s by torch on %s, not by Triton: %s", what, device, why)
    return False


def trial(device: torch.device, dtype: torch.dtype, dim: int) -> float:
    """Return the largest difference to torch's attention in float32 over two segments; inf for NaN."""
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
