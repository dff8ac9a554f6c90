"""Resolves the device that a setting names."""

from __future__ import annotations

import logging
import warnings

import torch

from vlmserve_common.errors import EngineError, SettingsError

log = logging.getLogger(__name__)

_LEAST_BFLOAT16 = (8, 0)


def resolve_device(name: str, setting: str = "--device") -> torch.device:
    """Turn auto, cpu, cuda or cuda:N into a torch device. setting: its name, for errors. SettingsError or
    EngineError if it cannot be used.

    cuda is the process's current GPU: by default the first. auto takes the CPU, with a log line, if there is a GPU that
    PyTorch cannot use.
    """
    available, trouble = (False, None) if name == "cpu" else _available()
    if name == "auto":
        if trouble is not None:
            log.warning("%s is auto, and takes the CPU: %s", setting, trouble)
        name = "cuda" if available else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if available else 0
    if not torch.backends.cuda.is_built():
        why = (
            f"the PyTorch that is installed ({torch.__version__}) is built without CUDA; install one that has it "
            "(https://pytorch.org/get-started/locally)"
        )
    elif trouble is not None:
        why = trouble
    elif not count:
        why = "PyTorch finds no GPU that it can use; nvidia-smi tells whether the driver sees one"
    elif (device.index or 0) >= count:
        why = f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, counted from cuda:0"
    else:
        # with its number, which is what tensors there name, and what `torch.cuda.set_device` wants
        return device if device.index is not None else torch.device("cuda", _current())
    # a driver may come later, another setting does not
    wrong = SettingsError if count or not torch.backends.cuda.is_built() else EngineError
    raise wrong(f"{setting} is {name!r}, but {why}{'' if count else ', or use cpu'}")


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise EngineError if a GPU has no arithmetic for the dtype of a model's computations."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_BFLOAT16:
        name = torch.cuda.get_device_name(device)
        raise EngineError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and bfloat16 needs 8.0: start with "
            "--dtype float16, or with float32"
        )


def _current() -> int:
    """Return the number of the current GPU, without beginning to use one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _available() -> tuple[bool, str | None]:
    """Return whether there is a GPU, and the warning with which PyTorch says why it cannot use one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    for warning in caught:
        text = str(warning.message)
        if "driver" in text and "too old" in text:  # _cuda_getDeviceCount, with its version: c10/cuda/CUDAFunctions.cpp
            found = text.partition("(found version ")[2].partition(")")[0]
            return available, (
                f"NVIDIA's driver is too old for this PyTorch, which is built for CUDA {torch.version.cuda}"
                f"{f'; it goes up to CUDA {_version(found)}' if found.isdecimal() else ''}: update it, or install a "
                "PyTorch for an older CUDA"
            )
        log.warning("PyTorch says: %s", text.partition("\n")[0])
    return available, None


def _version(number: str) -> str:
    """Format a version: 12040 is 12.4."""
    return f"{int(number) // 1000}.{int(number) % 1000 // 10}"
