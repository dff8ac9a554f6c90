"""Work that several ask for at the same time, done once."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

_Who = TypeVar("_Who", bound=Hashable)


class InFlight(Generic[_Who]):
    """Who does what, and who wants the same. Thread-safe; nobody waits here: who leads, deals with those who follow.

    Keeps nothing: whoever comes when the work is done leads again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: dict[Hashable, dict[_Who, None]] = {}  # a dict is a set in order

    def __len__(self) -> int:
        """Pieces of work under way; zero when idle."""
        return len(self._followers)

    def leads(self, key: Hashable, who: _Who) -> bool:
        """Whether the work is `who`'s to do, and then to end by `done` or `hand_over`. If not, `who` follows."""
        with self._lock:
            followers = self._followers.get(key)
            if followers is None:
                self._followers[key] = {}
                return True
            followers[who] = None
            return False

    def leave(self, key: Hashable, who: _Who) -> bool:
        """Follow no longer. Whether it did: if not, it leads, or was taken by `done` or `hand_over`."""
        with self._lock:
            followers = self._followers.get(key, {})
            followed = who in followers
            followers.pop(who, None)
            return followed

    def done(self, key: Hashable) -> list[_Who]:
        """The work is done: all who follow, in the order in which they came."""
        with self._lock:
            return list(self._followers.pop(key))

    def hand_over(self, key: Hashable) -> _Who | None:
        """The work failed, or is not wanted by who led: who leads from here on. None: nobody, it is over."""
        with self._lock:
            followers = self._followers[key]
            for first in followers:
                del followers[first]
                return first
            del self._followers[key]
            return None
