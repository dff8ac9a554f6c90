"""The device that a setting names, if it is there."""

from __future__ import annotations

import torch

from vlmserve_common.errors import EngineError


def resolve_device(name: str, setting: str = "--device") -> torch.device:
    """auto, cpu, cuda or cuda:N as a torch device. EngineError if it cannot be used. setting: whose value it is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not torch.backends.cuda.is_built():
        why = (
            f"the PyTorch that is installed ({torch.__version__}) is built without CUDA; install one that has it "
            "(https://pytorch.org/get-started/locally)"
        )
    elif not count:
        why = "PyTorch finds no GPU that it can use; nvidia-smi tells whether the driver sees one"
    elif (device.index or 0) >= count:
        why = f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, counted from cuda:0"
    else:
        return device
    raise EngineError(f"{setting} is {name!r}, but {why}{'' if count else ', or use cpu'}")
