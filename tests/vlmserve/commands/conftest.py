"""A checkpoint without weights, for the servers of `served.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vlmserve.api.fake_engine import write_checkpoint_folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))
