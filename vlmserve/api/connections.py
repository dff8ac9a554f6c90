"""Which connections of a server wait for a request, for how long they may, and which of them has to go for a new one.

A connection waits until a request's headers have come whole, and works until its answer was sent. One that waits costs
its client nothing and may be ended at any time; so when there are too many, the one that has waited longest makes room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

SPARE = 32
"""Connections above the limit that are taken, so that they can say what they want: /health is always answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Of a server. most: connections at a time. The rest are seconds: for a request's headers to come, and for a client
    to take what was sent to it."""

    most: int
    header_timeout_s: float
    send_timeout_s: float


class Connection(Protocol):
    """What can be done about a connection."""

    def drop(self) -> None:
        """End it at once: it waits, and another one needs its place."""

    def give_up(self) -> None:
        """End it: its headers did not come in time."""

    @property
    def stuck(self) -> bool:
        """Whether there is something to send that the client does not take."""

    def cut(self) -> None:
        """End it, whatever there is to send."""


class Connections:
    """All connections of one server, in one event loop.

    open: they, as the HTTP server counts them. clock: in seconds.
    """

    def __init__(
        self, limits: ConnectionLimits, open: Collection[Connection], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._open = open
        self._clock = clock
        self._waiting: dict[Connection, float] = {}  # until when, the longest waiting first
        self._stuck: dict[Connection, float] = {}  # since when

    @property
    def crowded(self) -> bool:
        """Whether more than there may be are at work."""
        return len(self._open) - len(self._waiting) > self._limits.most

    def admit(self, new: Connection) -> bool:
        """Take a new connection, which is among the open ones already; False: there is no room for it at all."""
        if len(self._open) > self._limits.most + SPARE:
            if not self._waiting:
                return False
            next(iter(self._waiting)).drop()
        self.reads_headers(new)
        return True

    def idles(self, connection: Connection) -> None:
        """It was answered; how long it is kept is the HTTP server's matter."""
        self._waiting[connection] = math.inf

    def reads_headers(self, connection: Connection) -> None:
        """From now on it has to send a request."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = self._clock() + self._limits.header_timeout_s

    def works(self, connection: Connection) -> None:
        """Its request is there."""
        self._waiting.pop(connection, None)

    def idle(self, connection: Connection) -> bool:
        """Whether it was answered, and has sent nothing since."""
        return self._waiting.get(connection) == math.inf

    def waits(self, connection: Connection) -> bool:
        """Whether it has no request in work."""
        return connection in self._waiting

    def moves(self, connection: Connection) -> None:
        """Its client has taken something of what was sent."""
        self._stuck.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self._waiting.pop(connection, None)
        self._stuck.pop(connection, None)

    def sweep(self) -> None:
        """End those whose time is over; to be called every now and then."""
        now = self._clock()
        for connection in [each for each, until in self._waiting.items() if until <= now]:
            self._waiting.pop(connection, None)
            connection.give_up()
        for connection in list(self._open):
            if not connection.stuck:
                self._stuck.pop(connection, None)
            elif now - self._stuck.setdefault(connection, now) >= self._limits.send_timeout_s:
                connection.cut()
