"""One small server of the built-in model, and one PostgreSQL, for all test files of a process that ask nothing special
of them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.default_model import copy_default_model
from tests.postgres import PostgresServer
from tests.vlmserve.own_stores import own_stores
from tests.vlmserve.server_process import ServerProcess, serving
from vlmserve.api import launch
from vlmserve.api.stores.opening import Stores
from vlmserve.config.settings import ServerSettings


@pytest.fixture(scope="session")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model in float32; not to be changed."""
    folder = tmp_path_factory.mktemp("default-model")
    copy_default_model(folder)
    return folder


@pytest.fixture(scope="session")
def shared_server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A test leaves it as it was: running, not paused, with nothing under way."""
    folder = tmp_path_factory.mktemp("shared-server")
    profiles = folder / "profiles"
    profiles.mkdir()
    flags = ("--enable-return-hidden-states", "--profile-dir", str(profiles))
    with serving(folder / "run", *flags, model=default_model) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A test leaves it running."""
    with closing(PostgresServer()) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    """Empty ones, of each kind."""
    url = request.getfixturevalue("postgres").new_database() if request.param == "postgres" else None
    with ExitStack() as stack:
        yield own_stores(tmp_path / "stores", stack, url)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings of every server that would have been started."""
    seen: list[ServerSettings] = []
    monkeypatch.setattr(launch, "launch_server", lambda settings: seen.append(settings) or 0)
    return seen


@pytest.fixture
def run() -> Iterator[Callable[..., ServerProcess]]:
    """Starts modules as servers, which end with the test: module, its words, and more of its environment."""
    with tempfile.TemporaryDirectory(prefix="v") as short, ExitStack() as stack:  # a socket's path may have 107 bytes

        def make(module: str, *words: str, **environment: str) -> ServerProcess:
            server = ServerProcess([sys.executable, "-m", module, *words], Path(short) / "run", **environment)
            stack.callback(server.end)
            return server

        yield make
