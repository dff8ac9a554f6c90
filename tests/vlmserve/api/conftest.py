"""A front end over a fake scheduler, and a client of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.batch_house import House
from tests.vlmserve.api.fake_engine import Served, official_client, real_server, serving, write_checkpoint_folder
from vlmserve.api.stores.opening import Stores

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches prices otherwise, when it is imported


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def serve(checkpoint_folder: Path) -> Iterator[Callable[..., tuple[Served, TestClient]]]:
    """Make front ends with settings of a test's own, each with a client. Nothing may be left of any request."""
    with contextlib.ExitStack() as stack:

        def make(
            engine: dict[str, Any] | None = None, *, folder: Path = checkpoint_folder, **settings: Any
        ) -> tuple[Served, TestClient]:
            served = stack.enter_context(serving(folder, engine, **settings))
            return served, TestClient(served.app, raise_server_exceptions=False)

        yield make


@pytest.fixture
def house(stores: Stores) -> Iterator[House]:
    with contextlib.ExitStack() as stack:
        yield House(stores, stack)


@pytest.fixture
def served(checkpoint_folder: Path) -> Iterator[Served]:
    with serving(checkpoint_folder) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[TestClient]:
    with TestClient(served.app, raise_server_exceptions=False) as client:
        yield client
        served.assert_idle()


@pytest.fixture
def port(served: Served) -> Iterator[int]:
    """Of the front end over real sockets."""
    with real_server(served.app) as port:
        yield port
    served.assert_idle()


@pytest.fixture
def ai(port: int) -> Iterator[openai.OpenAI]:
    with official_client(port) as client:
        yield client
