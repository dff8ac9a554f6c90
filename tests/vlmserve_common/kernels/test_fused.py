"""What computes on a GPU, as it is settled at the start."""

import sys

import pytest
import torch

from tests.vlmserve_common.kernels.triton_device import DEVICE
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels import fused

CPU = torch.device("cpu")


def test_a_cpu_has_torchs_unless_they_are_asked_for():
    assert fused.activate("auto", CPU) == "torch's operators"
    assert not fused.usable(torch.zeros(2, 4))


def test_what_they_take():
    pytest.importorskip("triton")
    assert fused.activate("triton", DEVICE) == "fused operators in Triton"
    assert fused.usable(torch.zeros(2, 4, device=DEVICE))
    assert not fused.usable(torch.zeros(2, 4, device=DEVICE).t())
    assert not fused.usable(torch.zeros(2, 4, device=DEVICE, dtype=torch.float64))
    assert not fused.usable(torch.zeros(2, 4, device="meta"))
    assert "--gpu-kernels torch" in fused.activate("torch", DEVICE)
    assert not fused.usable(torch.zeros(2, 4, device=DEVICE))


def fails(*_):
    raise RuntimeError("no C compiler\nwas found")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (fails, "RuntimeError: no C compiler was found"),
        (lambda x, weight, eps: torch.zeros_like(x), "RMSNorm of equal elements is not their weights"),
    ],
)
def test_a_trial_that_fails(monkeypatch, broken, said):
    norm = pytest.importorskip("vlmserve_common.kernels.gpu.norm")
    monkeypatch.setattr(norm, "rms_norm", broken)
    with pytest.raises(EngineError, match=f"--gpu-kernels triton: .* cannot be used on {DEVICE}: {said}"):
        fused.activate("triton", DEVICE)
    assert not fused.usable(torch.zeros(2, 4, device=DEVICE))


def test_auto_goes_on_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "vlmserve_common.kernels.gpu.norm", None)
    said = fused.activate("auto", torch.device("cuda"))
    assert said.startswith("torch's operators, which are slower: those in Triton cannot be used: ModuleNotFoundError")
    assert "\n" not in said
