"""What tests of checkpoints in other formats share: a plain one, and the operators or torch's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from vlmserve_common.kernels import fused, library


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that others are made of."""
    return make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("plain"))


@pytest.fixture(params=["operators", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """With the operators and without; which."""
    library.activate("auto" if request.param == "operators" else "off", threads=1)
    yield request.param
    library.activate("off", threads=1)


@pytest.fixture
def triton() -> None:
    """With the GPU's operators, under Triton's interpreter."""
    fused.activate("triton", torch.device("cpu"))


@pytest.fixture
def exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not round inputs of products with 8-bit floats."""
    monkeypatch.setattr(
        "vlmserve_common.compute.fp8.quantize", lambda x, group, scale: (x, torch.ones(len(x), -(-x.shape[1] // group)))
    )
