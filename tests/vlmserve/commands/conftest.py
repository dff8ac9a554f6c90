"""A checkpoint without weights, for the servers of `served.py`; logs that commands of this process set up, undone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vlmserve.api.fake_engine import Served, write_checkpoint_folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def served(server: tuple[Served, str]) -> Served:
    """Of a module's own fixture `server`: what `fake_server` gives."""
    return server[0]


@pytest.fixture
def url(server: tuple[Served, str]) -> str:
    return server[1]
