"""Timing of the fused operators: what is timed agrees, and all of it is there. Seconds mean nothing on a CPU."""

import pytest
import torch

from tests.vlmserve_common.kernels.triton_device import DEVICE
from vlmserve.commands.bench.gpu_kernels import LayerSizes, kernel_figures
from vlmserve_common.errors import EngineError

norm = pytest.importorskip("vlmserve_common.kernels.gpu.norm")
SIZES = LayerSizes(hidden=32, intermediate=48, heads=2, kv_heads=1, head_dim=16, vocab=60, tokens=(1, 3), sampled=(2,))


def test_every_operator_at_every_size():
    figures = kernel_figures(DEVICE, sizes=SIZES, rounds=1)
    assert len(figures) == 4 * len(SIZES.tokens) + len(SIZES.sampled)
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.ours.median > 0 and figure.theirs.median > 0 and figure.moved > 0 for figure in figures)


def test_operators_that_do_not_agree_are_not_timed(monkeypatch):
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps: x)
    with pytest.raises(EngineError, match=r"RMSNorm, 1 tokens: ours is .* away from torch's"):
        kernel_figures(DEVICE, sizes=SIZES, rounds=1)


def test_nan_is_no_agreement(monkeypatch):
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps: x * torch.nan)
    with pytest.raises(EngineError, match="nan away"):
        kernel_figures(DEVICE, sizes=SIZES, rounds=1)
