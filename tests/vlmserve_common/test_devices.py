"""Devices by name: what is not there is told, with what to do."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from vlmserve_common.compute.devices import check_dtype, resolve_device
from vlmserve_common.errors import EngineError, SettingsError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A build with CUDA and two GPUs."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_what_is_there_is_taken(gpus: pytest.MonkeyPatch) -> None:
    assert [str(resolve_device(name)) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda:0",
        "cpu",
        "cuda:0",
        "cuda:1",
    ]
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"


def test_a_gpu_can_be_made_the_current_one(gpus: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    gpus.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    for name in ("auto", "cuda", "cuda:1"):
        torch.cuda.set_device(resolve_device(name))
    assert chosen == [0, 0, 1]
    gpus.setattr(torch.cuda, "is_initialized", lambda: True)
    gpus.setattr(torch.cuda, "current_device", lambda: 1)
    assert str(resolve_device("cuda")) == "cuda:1"


def test_a_gpu_that_is_not_there(gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^--device is 'cuda:2', but there are 2 GPUs, counted from cuda:0$"):
        resolve_device("cuda:2")
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match=r"^--encoder-devices is 'cuda', but PyTorch finds no GPU .*, or use cpu$"):
        resolve_device("cuda", "--encoder-devices")


def test_a_build_without_cuda(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.backends.cuda, "is_built", lambda: False)
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SettingsError, match=r"^--device is 'cuda', but the PyTorch .* is built without CUDA; .*, or use cpu$"
    ):
        resolve_device("cuda")


OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
    "Alternatively, go to: https://pytorch.org to install a PyTorch version that has been compiled with your version "
    "of the CUDA driver. (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)"
)


def _warns(text: str) -> bool:
    warnings.warn(text, stacklevel=1)
    return False


def test_an_old_driver(gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gpus.setattr(torch.version, "cuda", "13.0")
    gpus.setattr(torch.cuda, "is_available", lambda: _warns(OLD_DRIVER))
    why = "NVIDIA's driver is too old for this PyTorch, which is built for CUDA 13.0; it goes up to CUDA 11.4: update"
    with pytest.raises(EngineError, match=rf"^--device is 'cuda', but {why} .*, or use cpu$"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"
    [line] = caplog.messages
    assert line.startswith(f"--device is auto, and takes the CPU: {why}")


def test_other_warnings_are_told(gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gpus.setattr(torch.cuda, "is_available", lambda: _warns("CUDA initialization: unknown error\nmore"))
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto").type == "cpu"
    assert caplog.messages == ["PyTorch says: CUDA initialization: unknown error"]


def test_a_gpu_without_bfloat16(gpus: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    gpus.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    gpus.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(EngineError, match=r"^Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0: start with"):
        check_dtype(torch.bfloat16, cuda)
    check_dtype(torch.float16, cuda)
    check_dtype(torch.bfloat16, torch.device("cpu"))
    gpus.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_dtype(torch.bfloat16, cuda)
