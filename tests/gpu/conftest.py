"""Tests on a CUDA device: `make test-gpu`. VLMSERVE_TEST_DEVICE names another: "cpu" runs the same tests there, but for
what only CUDA has. Without that variable they are skipped where there is no CUDA device; with it they fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.tiny_checkpoints import FAMILIES, make_checkpoint

_VARIABLE = "VLMSERVE_TEST_DEVICE"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test."""
    name = os.environ.get(_VARIABLE)
    if not name and not torch.cuda.is_available():
        pytest.skip(f"there is no CUDA device; {_VARIABLE}=cpu runs these tests on the CPU")
    chosen = torch.device(name or "cuda")
    torch.zeros(1, device=chosen)
    return chosen


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device under test, where it must be a GPU."""
    if device.type != "cuda":
        pytest.skip("what this tests is there on GPUs only")
    return device


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of each family, float32."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
