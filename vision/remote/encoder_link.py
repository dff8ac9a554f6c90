"""A link to one encoder on another server: it connects, compares towers, asks for rows, and connects again.

All of it runs in one event loop (`remote_backend`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import replace

import numpy as np
import torch

from vision.remote.protocol import (
    FROM_CONSUMER,
    FROM_ENCODER,
    MOST_BYTES,
    PROTOCOL,
    RENEW_S,
    SILENT_S,
    Alive,
    Answer,
    Ask,
    Hello,
    Pixels,
    Pull,
    Release,
    Renew,
    Rows,
    Status,
    TowerIdentity,
)
from vision.towers.temporal_patch import TemporalPatch
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.transport.addresses import split_tcp_url
from vlmserve_common.transport.peers import PeerConnection, PeerError, call, until_one_ends

log = logging.getLogger(__name__)

_SMALL_BYTES = 2**16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_NO_PIXELS = np.empty(0, np.uint8)


class LinkError(Exception):
    """An encoder has not made the rows that it was asked for. The message says why."""


class EncoderLink:
    """A link to the encoder at `url`, while `run` runs.

    tower: what the encoder must have, too. key: see `peers`. usable: whether it can be asked. patches: vision patches
    that it is asked for now. asked, pixels, rows: see `LinkStats`.
    """

    def __init__(self, url: str, tower: TowerIdentity, key: str | None) -> None:
        self.url = url
        self.usable = False
        self.patches = self.asked = self.pixels = self.rows = 0
        self.rests_until = 0.0
        self._tower = tower
        self._key = key
        self._numbers = itertools.count()
        self._unsent: asyncio.Queue[object] = asyncio.Queue()
        self._open: dict[int, asyncio.Queue[Answer | Rows | LinkError]] = {}
        self._connection: PeerConnection | None = None
        self._ended_bytes = [0, 0]
        self._told = ""

    @property
    def num_open(self) -> int:
        """Return how many temporal patches it is asked for now."""
        return len(self._open)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received since the start."""
        there = self._connection
        sent, received = self._ended_bytes
        return (sent, received) if there is None else (sent + there.sent_bytes, received + there.received_bytes)

    async def fetch(self, patch: TemporalPatch, shape: tuple[int, int]) -> torch.Tensor:
        """Return the rows of a temporal patch, in the tower's dtype. Raises LinkError. If cancelled, the encoder
        learns that they are not wanted any more."""
        assert self.usable
        number = next(self._numbers)
        answers = self._open[number] = asyncio.Queue()
        self.asked += 1
        self.patches += patch.num_patches
        sent = False
        try:
            self._unsent.put_nowait(Ask(number=number, patch=replace(patch, pixels=_NO_PIXELS), shape=shape))
            while True:
                match await answers.get():
                    case Rows(rows=rows):
                        if tuple(rows.shape) != shape or dtype_name(rows.dtype) != self._tower.dtype:
                            raise LinkError(f"it sent {dtype_name(rows.dtype)} {list(rows.shape)}, not {list(shape)}")
                        self.rows += 1
                        return rows
                    case Answer(status=Status.OK):
                        self._unsent.put_nowait(Pull(number=number))
                    case Answer(status=Status.MISSING):
                        self.pixels += not sent
                        sent = True
                        self._unsent.put_nowait(Pixels(number=number, pixels=patch.pixels))
                    case Answer(status=Status.NOT_READY):
                        pass
                    case Answer(status=status, reason=reason):
                        raise LinkError(f"{status}: {reason}")
                    case LinkError() as error:
                        raise error
        finally:
            del self._open[number]
            self.patches -= patch.num_patches
            self._unsent.put_nowait(Release(number=number))

    async def run(self) -> None:
        """Keep the link up until cancelled. What goes wrong is logged once, until something else does."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                host, port = split_tcp_url(self.url)
                connection = await call(
                    host, port, protocol=PROTOCOL, key=self._key, send_types=FROM_CONSUMER, receive_types=FROM_ENCODER
                )
                with contextlib.closing(connection):
                    await self._agree(connection)
                    pause_s = _FIRST_PAUSE_S
                    await self._serve(connection)
            except Exception as error:
                self._tell(f"is not used: {str(error) or 'it does not answer'}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _agree(self, connection: PeerConnection) -> None:
        async with asyncio.timeout(SILENT_S):
            hello = await connection.receive(_SMALL_BYTES)
        if not isinstance(hello, Hello):
            raise PeerError(f"{type(hello).__name__} came in place of Hello")
        if different := self._tower.differences(hello.tower):
            raise PeerError(f"it has another tower: {different}")
        await connection.send(Hello(tower=self._tower))

    async def _serve(self, connection: PeerConnection) -> None:
        self._connection, self._unsent = connection, asyncio.Queue()
        self.usable = True
        self._tell("is used")
        try:
            await until_one_ends(
                self._receive(connection), self._send(connection, self._unsent), self._watch(connection)
            )
        finally:
            self.usable, self._connection = False, None
            self._ended_bytes[0] += connection.sent_bytes
            self._ended_bytes[1] += connection.received_bytes
            for answers in self._open.values():
                answers.put_nowait(LinkError("the link has ended"))

    async def _receive(self, connection: PeerConnection) -> None:
        while True:
            message = await connection.receive(MOST_BYTES)
            if isinstance(message, Answer | Rows):
                if (answers := self._open.get(message.number)) is not None:  # else it was cancelled
                    answers.put_nowait(message)
            elif not isinstance(message, Alive):
                raise PeerError(f"{type(message).__name__} came in the middle")

    async def _send(self, connection: PeerConnection, unsent: asyncio.Queue[object]) -> None:
        while True:
            await connection.send(await unsent.get())

    async def _watch(self, connection: PeerConnection) -> None:
        """Renew the leases, and end the connection when the encoder is silent."""
        loop = asyncio.get_running_loop()
        while True:
            self._unsent.put_nowait(Renew())
            await asyncio.sleep(RENEW_S)
            if loop.time() - connection.heard > SILENT_S:
                raise PeerError(f"it said nothing for {SILENT_S:g} s")

    def _tell(self, what: str) -> None:
        if what != self._told:
            self._told = what
            log.log(logging.INFO if what == "is used" else logging.WARNING, "the encoder %s %s", self.url, what)
