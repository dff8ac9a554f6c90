"""An agent: the thread beside a rank that lets others read its KV, and reads others' KV into its own slots."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import zmq

from vlmserve.disaggregation.links import Answering, Worker
from vlmserve.disaggregation.messages import (
    AgentInfo,
    Describe,
    Described,
    FromAgent,
    Pull,
    Pulled,
    Read,
    Refusal,
    Rows,
    ToAgent,
)
from vlmserve.disaggregation.pools import KVPool
from vlmserve.disaggregation.tcp import TcpTransport
from vlmserve.disaggregation.transport import Piece, Transport
from vlmserve_common.errors import EngineError
from vlmserve_common.process.wake_up import Mailbox
from vlmserve_common.transport.wire import WireError

log = logging.getLogger(__name__)

_AHEAD = 2  # pieces asked of one agent at a time: one is read while the other is written
_LOOK_S = 0.25


@dataclass(eq=False, kw_only=True)
class _Job:
    """A pull under way. asked: tickets of pieces that are on their way."""

    asker: bytes
    order: Pull
    waiting: dict[str, deque[Piece]]
    asked: dict[int, Piece] = field(default_factory=dict)
    moved_at: float = 0.0

    @property
    def addresses(self) -> set[str]:
        """Return the agents that something is still to come from."""
        return {*self.waiting, *(piece.source.address for piece in self.asked.values())}


class KVAgent:
    """Serves reads of `pool` at a port of `host`, and carries pulls out. `start` begins, `close` ends.

    transports: further ones than `tcp`, by name, the best first. patience_s: a pull fails if nothing has come for so
    long. clock: in seconds.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        host: str,
        peer_key: str | None,
        patience_s: float,
        transports: Mapping[str, Transport] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._patience_s, self._clock = pool, patience_s, clock
        self._transports: dict[str, Transport] = {**(transports or {}), "tcp": TcpTransport(pool, peer_key)}
        self._askers = Answering(host, 0, get_args(FromAgent), get_args(ToAgent), peer_key)
        self.port = self._askers.port
        self._jobs: dict[int, _Job] = {}
        self._tickets = itertools.count(1)
        self._stop: Mailbox[None] = Mailbox()
        self._worker = Worker("kv-agent")

    def info(self, *, host: str = "", group: int = 0) -> AgentInfo:
        """Describe this agent to others."""
        return AgentInfo(
            host=host,
            port=self.port,
            group=group,
            parts=self._pool.parts,
            state=self._pool.state_shape,
            transports=tuple(self._transports),
        )

    def start(self) -> None:
        """Begin to serve."""
        self._worker.start(self._run)

    def close(self) -> None:
        """End the thread and all links."""
        self._worker.close(lambda: self._stop.put(None))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        transports = self._transports.values()
        while not self._worker.ends:
            poller = zmq.Poller()
            sockets = [socket for transport in transports for socket in transport.sockets]
            for source in (self._askers.socket, self._stop.fd, *sockets):
                poller.register(source, zmq.POLLIN)
            waits = [transport.wait_s for transport in transports if transport.wait_s is not None]
            waits += [_LOOK_S] if self._jobs else []
            poller.poll(int(min(waits) * 1000) if waits else None)
            self._stop.take()
            self._take_requests()
            for transport in transports:
                for ticket, error in transport.poll():
                    self._take_ended(ticket, error)
            for job in list(self._jobs.values()):
                if self._clock() - job.moved_at > self._patience_s:
                    late = ", ".join(sorted(job.addresses))
                    self._end(job, f"nothing has come from {late} for {self._patience_s:g} s")
        for transport in transports:
            transport.close()
        self._askers.close()

    def _take_requests(self) -> None:
        while (received := self._askers.receive()) is not None:
            asker, message = received
            if isinstance(message, WireError):
                log.warning("a request for KV was refused: %s", message)
                self._askers.send(asker, Refusal(message=str(message)))
            elif isinstance(message, Read):
                self._askers.send(asker, self._read(message))
            elif isinstance(message, Describe):
                self._askers.send(asker, self._described())
            elif isinstance(message, Pull):
                self._begin(asker, message)
            elif (job := self._jobs.get(message.ticket)) is not None:
                self._end(job, "cancelled")

    def _read(self, read: Read) -> Rows:
        try:
            return Rows(ticket=read.ticket, data=self._pool.gather(read.cuts, read.slots, read.state))
        except EngineError as error:
            log.warning("KV was asked for that is not here: %s", error)
            return Rows(ticket=read.ticket, data=np.zeros(0, dtype=np.uint8), error=str(error))

    def _described(self) -> Described | Refusal:
        found = [one for transport in self._transports.values() if (one := transport.describe()) is not None]
        return found[0] if found else Refusal(message="KV here cannot be read but by tcp")

    def _begin(self, asker: bytes, order: Pull) -> None:
        job = _Job(asker=asker, order=order, waiting={}, moved_at=self._clock())
        self._jobs[order.ticket] = job
        for source in order.sources:
            count = self._transports[source.transport].most_slots(source.own_cuts)
            pieces = deque(
                Piece(source=source, slots=order.slots[at : at + count], own_slots=order.own_slots[at : at + count])
                for at in range(0, len(order.slots), count)
            )
            if source.has_state and order.own_state >= 0:
                none = order.slots[:0]
                states = {"state": order.state, "own_state": order.own_state}
                pieces.append(Piece(source=source, slots=none, own_slots=none, **states))
            if pieces:
                job.waiting[source.address] = pieces
        for address in list(job.waiting):
            self._ask(job, address)
        self._end_if_done(job)

    def _ask(self, job: _Job, address: str) -> None:
        pieces = job.waiting.get(address)
        while pieces and sum(piece.source.address == address for piece in job.asked.values()) < _AHEAD:
            piece, ticket = pieces.popleft(), next(self._tickets)
            job.asked[ticket] = piece
            self._transports[piece.source.transport].read(ticket, piece)
        if not pieces:
            job.waiting.pop(address, None)

    def _take_ended(self, ticket: int, error: str) -> None:
        job = next((one for one in self._jobs.values() if ticket in one.asked), None)
        if job is None:  # it has failed by another piece that ended at the same time
            return
        piece = job.asked.pop(ticket)
        if error:
            self._end(job, error)
            return
        job.moved_at = self._clock()
        self._ask(job, piece.source.address)
        self._end_if_done(job)

    def _end_if_done(self, job: _Job) -> None:
        if not job.asked and not job.waiting:
            self._end(job, "")

    def _end(self, job: _Job, error: str) -> None:
        del self._jobs[job.order.ticket]
        for ticket, piece in job.asked.items():
            self._transports[piece.source.transport].drop(ticket)
        self._askers.send(job.asker, Pulled(ticket=job.order.ticket, error=error))
