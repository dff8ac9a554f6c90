"""The encoder's side of the links: connections of consumers, in a thread with an event loop.

It checks who calls and moves messages. `encode_service` decides what they mean, in the thread of the encoder pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vision.remote.protocol import (
    FROM_CONSUMER,
    FROM_ENCODER,
    LEASE_S,
    MOST_BYTES,
    PROTOCOL,
    RENEW_S,
    Alive,
    Ask,
    Hello,
    Pixels,
    Pull,
    Release,
    Renew,
    TowerIdentity,
)
from vlmserve_common.process.loop_thread import LoopThread
from vlmserve_common.process.wake_up import Mailbox
from vlmserve_common.transport.addresses import tcp_url
from vlmserve_common.transport.peers import PeerConnection, PeerError, answer, until_one_ends

log = logging.getLogger(__name__)

_BACKLOG = 64
_SMALL_BYTES = 2**16  # before it is known that the caller has the same tower


@dataclass(frozen=True, slots=True)
class Gone:
    """A consumer's connection has ended, and its leases with it."""


Event: TypeAlias = Ask | Pixels | Pull | Release | Gone


class EncoderServer:
    """Answers consumers at a listening socket, which it closes in the end.

    tower: what consumers must have, too. key: see `peers`. fd: readable when `take` has something. `take`, `send`,
    `drop` and `silent_s` are for one other thread.
    """

    def __init__(self, listener: socket.socket, tower: TowerIdentity, key: str | None) -> None:
        self._listener = listener
        self._tower = tower
        self._key = key
        self._events = Mailbox[tuple[int, Event]]()
        self._numbers = itertools.count()
        self._consumers: dict[int, _Consumer] = {}
        self._closed_bytes = [0, 0]
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._thread = LoopThread("encoder-links")
        self._serving = self._thread.start(self._serve())

    @property
    def fd(self) -> int:
        return self._events.fd

    @property
    def url(self) -> str:
        """The address for `--encoder-urls` on this machine."""
        host, port = self._listener.getsockname()[:2]
        return tcp_url(host, port)

    @property
    def num_consumers(self) -> int:
        """Return how many consumers are connected."""
        return len(self._consumers)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received since the start."""
        sent, received = self._closed_bytes
        for consumer in list(self._consumers.values()):
            sent += consumer.connection.sent_bytes
            received += consumer.connection.received_bytes
        return sent, received

    def take(self) -> list[tuple[int, Event]]:
        """Return what consumers have sent since, each with the number of its connection."""
        return self._events.take()

    def send(self, consumer: int, message: object) -> None:
        """Send a message behind the earlier ones. Ignored if the connection has ended."""
        if (there := self._consumers.get(consumer)) is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                there.loop.call_soon_threadsafe(there.unsent.put_nowait, message)

    def drop(self, consumer: int, reason: str) -> None:
        """End a connection. A `Gone` follows."""
        if (there := self._consumers.get(consumer)) is not None:
            with contextlib.suppress(RuntimeError):
                there.loop.call_soon_threadsafe(there.end, reason)

    def silent_s(self, consumer: int) -> float:
        """Return the seconds since a consumer's last byte; 0 if its connection has ended."""
        there = self._consumers.get(consumer)
        return 0.0 if there is None else there.loop.time() - there.connection.heard

    def close(self) -> None:
        """End all connections, and the thread."""
        self._thread.close()
        self._listener.close()
        self._events.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    sock, address = await loop.sock_accept(self._listener)
                except OSError as error:  # no more files may be open
                    log.warning("a consumer could not be let in: %s", error)
                    await asyncio.sleep(RENEW_S)
                    continue
                tasks.create_task(self._talk(sock, f"{address[0]}:{address[1]}"))

    async def _talk(self, sock: socket.socket, name: str) -> None:
        number = next(self._numbers)
        try:
            connection = await answer(
                sock, protocol=PROTOCOL, key=self._key, send_types=FROM_ENCODER, receive_types=FROM_CONSUMER
            )
            with contextlib.closing(connection):
                consumer = _Consumer(connection)
                await self._agree(connection)
                self._consumers[number] = consumer
                try:
                    await consumer.run(lambda event: self._events.put((number, event)))
                finally:
                    del self._consumers[number]
                    self._closed_bytes[0] += connection.sent_bytes
                    self._closed_bytes[1] += connection.received_bytes
                    self._events.put((number, Gone()))
        except Exception as error:  # whatever it is, other connections go on
            log.info("the link of %s has ended: %s", name, str(error) or type(error).__name__)

    async def _agree(self, connection: PeerConnection) -> None:
        async with asyncio.timeout(LEASE_S):
            await connection.send(Hello(tower=self._tower))
            hello = await connection.receive(_SMALL_BYTES)
        if not isinstance(hello, Hello):
            raise PeerError(f"{type(hello).__name__} came in place of Hello")
        if different := self._tower.differences(hello.tower):
            raise PeerError(f"a consumer has another tower: {different}")


class _Consumer:
    """A connection whose consumer has the same tower."""

    def __init__(self, connection: PeerConnection) -> None:
        self.connection = connection
        self.loop = asyncio.get_running_loop()
        self.unsent: asyncio.Queue[object] = asyncio.Queue()
        self._ended: asyncio.Future[str] = self.loop.create_future()

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self, tell: Callable[[Event], None]) -> None:
        """Move messages until the connection ends. Raises OSError or PeerError, which say why."""
        await until_one_ends(self._receive(tell), self._send(), self._watch())

    async def _receive(self, tell: Callable[[Event], None]) -> None:
        while True:
            message = await self.connection.receive(MOST_BYTES)
            if isinstance(message, Renew):
                self.unsent.put_nowait(Alive())
            elif isinstance(message, Hello):
                raise PeerError("a Hello came again")
            else:
                tell(message)

    async def _send(self) -> None:
        while True:
            await self.connection.send(await self.unsent.get())

    async def _watch(self) -> None:
        """End the connection when its leases are over, or when `end` was called."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    raise PeerError(await asyncio.shield(self._ended))
            if self.loop.time() - self.connection.heard > LEASE_S:
                raise PeerError(f"the consumer said nothing for {LEASE_S:g} s")
