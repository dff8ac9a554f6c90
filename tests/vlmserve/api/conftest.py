"""A front end over a fake scheduler, and a client of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import Served, make_served, write_checkpoint_folder

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches prices otherwise, when it is imported


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def served(checkpoint_folder: Path) -> Iterator[Served]:
    served = make_served(checkpoint_folder)
    yield served
    asyncio.run(served.frontend.close())


@pytest.fixture
def client(served: Served) -> Iterator[TestClient]:
    """Every test with it must leave the house empty."""
    with TestClient(served.app, raise_server_exceptions=False) as client:
        yield client
        served.assert_idle()
