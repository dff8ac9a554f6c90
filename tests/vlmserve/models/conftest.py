"""What tests of models share: a plain checkpoint, and the operators on or off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_checkpoints import make_checkpoint
from vlmserve_common.kernels import library


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of float32; not to be changed."""
    return make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("plain"))


@pytest.fixture(params=["operators", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """With the operators and without; which."""
    library.activate("auto" if request.param == "operators" else "off", threads=2)
    return request.param
