"""What goes wrong on a GPU, in words that say what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vlmserve_common.errors import DeviceLostError, EngineError

# Raised since torch 2.8 for what CUDA reports; before, it is a plain RuntimeError.
_REPORTED: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """EngineError where the GPU's memory is too small for `what`; DeviceLostError where it reports anything else, which
    may be the fault of what was launched some time before."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"{what} needs more GPU memory than is left ({_first_line(error)}): lower --mem-fraction-static, "
            "--chunked-prefill-size or --max-running-requests"
        ) from error
    except _REPORTED as error:
        if "CUDA" not in str(error):
            raise
        raise DeviceLostError(
            f"the GPU failed at {what}, or at what was launched before it, and has to be started anew: "
            f"{_first_line(error)} (the environment variable CUDA_LAUNCH_BLOCKING=1 shows where)"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()
