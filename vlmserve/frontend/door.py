"""The door between clients and the engine: it closes while weights change, and requests wait in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Visit:
    """Requests of one client that belong together. Once one of them is inside, the others follow though the door may be
    closed, and the visit itself stays inside until `Door.end`. changes: see `Door`, at its beginning."""

    is_inside: bool = False
    changes: int = 0


class Door:
    """Requests of one event loop pass it one by one. inside: requests that have passed and not ended. It is closed as
    long as there are reasons, which are words. changes: how often the weights behind it have changed."""

    def __init__(self) -> None:
        self.inside = self.changes = 0
        self._reasons: set[str] = set()
        self._changed: set[asyncio.Event] = set()

    def close(self, reason: str) -> None:
        """Let nobody pass any more. Who is inside stays."""
        self._reasons.add(reason)

    def open(self, reason: str) -> None:
        """Take a reason back, if there is one of this name."""
        self._reasons.discard(reason)
        self._tell()

    async def pass_through(self, visit: Visit | None = None) -> None:
        """Wait until the door is open, and be inside from then on, until `leave`."""
        while self._reasons and not (visit is not None and visit.is_inside):
            await self._change()
        self.inside += 1
        if visit is not None and not visit.is_inside:
            visit.is_inside, visit.changes = True, self.changes
            self.inside += 1
            self._tell()  # the others of the visit, who may wait here

    def leave(self) -> None:
        """Be inside no longer."""
        self.inside -= 1
        self._tell()

    def end(self, visit: Visit) -> None:
        """End a visit, whether or not it ever was inside."""
        if visit.is_inside:
            visit.is_inside = False
            self.leave()

    async def empty(self) -> None:
        """Wait until nobody is inside."""
        while self.inside:
            await self._change()

    @contextmanager
    def shut(self, reason: str) -> Iterator[None]:
        """Keep it closed for a while."""
        self.close(reason)
        try:
            yield
        finally:
            self.open(reason)

    async def _change(self) -> None:
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            await changed.wait()
        finally:
            self._changed.discard(changed)

    def _tell(self) -> None:
        for changed in self._changed:
            changed.set()
