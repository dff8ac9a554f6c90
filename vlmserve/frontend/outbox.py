"""What has come for one reader and was not taken yet."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Outbox(Generic[_T]):
    """A queue with one reader, who takes all that is there: the longer it was away, the less an item costs it."""

    def __init__(self) -> None:
        self._items: list[_T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: _T) -> None:
        """Add an item, in the reader's event loop."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[_T]:
        """All items, oldest first, as soon as there is one. May be cancelled; nothing is lost then."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items
