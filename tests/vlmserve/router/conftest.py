"""Two servers that do as they are told, and a router in front of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vlmserve.api.fake_engine import WAIT_S
from tests.vlmserve.router.rig import FakeServer, Router, fake_servers, routing
from tests.vlmserve.server_process import await_that


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with fake_servers(2) as servers:
        yield servers


@pytest.fixture
def router(servers: list[FakeServer]) -> Iterator[Router]:
    with routing("--replica", *(server.url for server in servers)) as router:
        await_that(lambda: set(router.states().values()) == {"healthy"}, WAIT_S)
        yield router
