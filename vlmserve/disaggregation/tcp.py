"""KV over ZeroMQ: the other agent's thread copies what is asked for into sealed messages. Needs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch
import zmq

from vlmserve.disaggregation.links import Link
from vlmserve.disaggregation.messages import FromAgent, Read, Refusal, Rows, ToAgent
from vlmserve.disaggregation.pools import KVPool
from vlmserve.disaggregation.transport import Piece
from vlmserve_common.errors import EngineError
from vlmserve_common.transport.wire import WireError

_PIECE_BYTES = 8 * 2**20


class TcpTransport:
    """A link to each agent that something is read from, for as long as it is."""

    def __init__(self, pool: KVPool, peer_key: str | None) -> None:
        self._pool, self._peer_key = pool, peer_key
        self._links: dict[str, Link] = {}
        self._asked: dict[int, Piece] = {}

    def describe(self) -> None:
        """Return None: the agent's own thread is asked."""

    def most_slots(self, cuts: np.ndarray) -> int:
        """Return how many slots of these own cuts a message has."""
        return max(1, _PIECE_BYTES // max(1, self._pool.width(cuts)))

    def read(self, ticket: int, piece: Piece) -> None:
        """Ask the other agent."""
        address = piece.source.address
        if address not in self._links:
            self._links[address] = Link(address, get_args(ToAgent), get_args(FromAgent), self._peer_key)
        self._asked[ticket] = piece
        self._links[address].send(Read(ticket=ticket, cuts=piece.source.cuts, slots=piece.slots, state=piece.state))

    def poll(self) -> list[tuple[int, str]]:
        """Write what has come, and let go of links that nothing more is to come by."""
        ended: list[tuple[int, str]] = []
        for address, link in list(self._links.items()):
            waiting = [ticket for ticket, piece in self._asked.items() if piece.source.address == address]
            try:
                while waiting and (message := link.receive()) is not None:
                    if isinstance(message, Refusal):
                        raise WireError(message.message)
                    assert isinstance(message, Rows), message
                    if (piece := self._asked.pop(message.ticket, None)) is not None:  # else it was given up
                        ended.append((message.ticket, message.error or self._write(piece, message.data)))
            except WireError as error:
                broken = [ticket for ticket in waiting if self._asked.pop(ticket, None) is not None]
                ended += [(ticket, str(error)) for ticket in broken]
                waiting = []
            if not waiting:
                self._links.pop(address).close()
        return ended

    def drop(self, ticket: int) -> None:
        """Forget a read; its answer is thrown away."""
        self._asked.pop(ticket, None)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Those of all links."""
        return [link.socket for link in self._links.values()]

    @property
    def wait_s(self) -> None:
        """None: whatever comes, comes by a socket."""

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.close()

    def _write(self, piece: Piece, data: np.ndarray) -> str:
        """Write what has come. Returns why it cannot be written; "" if it was."""
        try:
            self._pool.scatter(piece.source.own_cuts, piece.own_slots, torch.from_numpy(data), piece.own_state)
        except EngineError as error:
            return str(error)
        return ""
