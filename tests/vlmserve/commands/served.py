"""The real HTTP server without a model behind it, for the commands that are its clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from tests.vlmserve.api.fake_engine import Served, make_served, real_server


@contextlib.contextmanager
def fake_server(*args: Any, **settings: Any) -> Iterator[tuple[Served, str]]:
    """Serve for the time of a block; the address. args, settings: of `make_served`."""
    served = make_served(*args, **settings)
    with real_server(served.app) as port:
        yield served, f"http://127.0.0.1:{port}"
    asyncio.run(served.frontend.close())
