"""Devices by name: what is not there is told, with what to do."""

from __future__ import annotations

import pytest
import torch

from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.errors import EngineError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A build with CUDA and two GPUs."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_what_is_there_is_taken(gpus: pytest.MonkeyPatch) -> None:
    assert [str(resolve_device(name)) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda",
        "cpu",
        "cuda",
        "cuda:1",
    ]
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"


def test_a_gpu_that_is_not_there(gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"^--device is 'cuda:2', but there are 2 GPUs, counted from cuda:0$"):
        resolve_device("cuda:2")
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match=r"^--encoder-devices is 'cuda', but PyTorch finds no GPU .*, or use cpu$"):
        resolve_device("cuda", "--encoder-devices")


def test_a_build_without_cuda(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.backends.cuda, "is_built", lambda: False)
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        EngineError, match=r"^--device is 'cuda', but the PyTorch .* is built without CUDA; .*, or use cpu$"
    ):
        resolve_device("cuda")
