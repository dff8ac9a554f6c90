"""The connections of a server: which of them wait for a request, and which one makes room for a new one.

A connection waits until the headers of a request have arrived, and works until the answer was sent. A waiting
connection costs its client nothing and may be ended at any time. If there are too many connections, the one that has
waited longest is ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

SPARE = 32
"""Connections that are taken above the limit, since /health is always answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits of a server. most: connections at a time. header_timeout_s: seconds until a request's headers have
    arrived. send_timeout_s: seconds until a client takes the bytes that were sent to it."""

    most: int
    header_timeout_s: float
    send_timeout_s: float


class Connection(Protocol):
    """A connection, with the ways to end it."""

    def drop(self) -> None:
        """End the connection at once: it waits, and another one needs its place."""

    def give_up(self) -> None:
        """End the connection: its headers did not arrive in time."""

    @property
    def stuck(self) -> bool:
        """Return True if there are bytes to send that the client does not take."""

    def cut(self) -> None:
        """End the connection, whatever there is to send."""


class Connections:
    """All connections of one server, in one event loop.

    open: the connections as the HTTP server counts them. clock: in seconds.
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
        """Return True if more connections work than the limit."""
        return len(self._open) - len(self._waiting) > self._limits.most

    def admit(self, new: Connection) -> bool:
        """Take a new connection, which is in `open` already. Returns False if there is no room for it at all."""
        if len(self._open) > self._limits.most + SPARE:
            if not self._waiting:
                return False
            next(iter(self._waiting)).drop()
        self.reads_headers(new)
        return True

    def idles(self, connection: Connection) -> None:
        """Note that a connection was answered. The HTTP server decides how long it is kept."""
        self._waiting[connection] = math.inf

    def reads_headers(self, connection: Connection) -> None:
        """Note that a connection has to send a request from now on."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = self._clock() + self._limits.header_timeout_s

    def works(self, connection: Connection) -> None:
        """Note that the request of a connection is there."""
        self._waiting.pop(connection, None)

    def idle(self, connection: Connection) -> bool:
        """Return True if the connection was answered, and has sent nothing since."""
        return self._waiting.get(connection) == math.inf

    def waits(self, connection: Connection) -> bool:
        """Return True if the connection has no request in work."""
        return connection in self._waiting

    def moves(self, connection: Connection) -> None:
        """Note that a client has taken some of the bytes sent to it."""
        self._stuck.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._waiting.pop(connection, None)
        self._stuck.pop(connection, None)

    def sweep(self) -> None:
        """End the connections whose time is over. Call this every now and then."""
        now = self._clock()
        for connection in [each for each, until in self._waiting.items() if until <= now]:
            self._waiting.pop(connection, None)
            connection.give_up()
        for connection in list(self._open):
            if not connection.stuck:
                self._stuck.pop(connection, None)
            elif now - self._stuck.setdefault(connection, now) >= self._limits.send_timeout_s:
                connection.cut()
