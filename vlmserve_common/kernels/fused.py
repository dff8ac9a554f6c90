"""Whether this process computes with the GPU's fused operators (`kernels.gpu`), or with torch's: settled once, by the
composition root."""

from __future__ import annotations

from typing import Literal

import torch

from vlmserve_common.errors import EngineError

Choice = Literal["auto", "triton", "torch"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_device_type: str | None = None


def activate(choice: Choice, device: torch.device) -> str:
    """Compute on `device` with the fused operators from now on, if one of them does there what it should; torch: not.

    Returns, for people, what computes. auto: torch on a CPU, and where the trial fails; triton: EngineError then. On a
    CPU they run under Triton's interpreter only.
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


def usable(x: torch.Tensor) -> bool:
    """Whether a fused operator may take x: contiguous, in a dtype that they know, and where they are active."""
    return x.device.type == _device_type and x.dtype in _DTYPES and x.is_contiguous()


def _trial(device: torch.device) -> str:
    """What is wrong, in a line; "" if nothing is."""
    try:
        from vlmserve_common.kernels.gpu.norm import rms_norm

        with torch.inference_mode():
            found = rms_norm(torch.full((2, 48), 3.0, device=device), torch.full((48,), 0.5, device=device), 0.0)
            right = bool((found - 0.5).abs().max() < 1e-6)
    except Exception as error:  # of the import, the compiler or the driver: whatever it is, torch computes then
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if right else "RMSNorm of equal elements is not their weights"
