"""An agent: the thread beside a rank that lets others read its KV, and reads others' KV into its own slots."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import zmq

from vlmserve.disaggregation.links import (
    Answering,
    Link,
    Worker,
)
from vlmserve.disaggregation.messages import (
    AgentInfo,
    FromAgent,
    Pull,
    Pulled,
    Read,
    Refusal,
    Rows,
    Source,
    ToAgent,
)
from vlmserve.disaggregation.pools import KVPool
from vlmserve_common.errors import EngineError
from vlmserve_common.process.wake_up import Mailbox
from vlmserve_common.transport.wire import WireError

log = logging.getLogger(__name__)

_PIECE_BYTES = 8 * 2**20
_AHEAD = 2  # pieces asked of one agent at a time: one is read while the other is written
_LOOK_S = 0.25


@dataclass(eq=False, kw_only=True)
class _Piece:
    """Some slots, or the recurrent state, that are asked of one agent."""

    source: Source
    slots: np.ndarray
    own_slots: np.ndarray
    with_state: bool


@dataclass(eq=False, kw_only=True)
class _Job:
    """A pull under way. asked: tickets of pieces that are on their way."""

    asker: bytes
    order: Pull
    waiting: dict[str, deque[_Piece]]
    asked: dict[int, _Piece] = field(default_factory=dict)
    moved_at: float = 0.0

    @property
    def addresses(self) -> set[str]:
        """Return the agents that something is still to come from."""
        return {*self.waiting, *(piece.source.address for piece in self.asked.values())}


class KVAgent:
    """Serves reads of `pool` at a port of `host`, and carries pulls out. `start` begins, `close` ends.

    patience_s: a pull fails if nothing has come for so long. clock: in seconds.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        host: str,
        peer_key: str | None,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._patience_s, self._clock = pool, patience_s, clock
        self._peer_key = peer_key
        self._askers = Answering(host, 0, get_args(FromAgent), get_args(ToAgent), peer_key)
        self.port = self._askers.port
        self._links: dict[str, Link] = {}
        self._jobs: dict[int, _Job] = {}
        self._tickets = itertools.count(1)
        self._stop: Mailbox[None] = Mailbox()
        self._worker = Worker("kv-agent")

    def info(self, *, host: str = "", group: int = 0) -> AgentInfo:
        """Describe this agent to others."""
        pool = self._pool
        return AgentInfo(host=host, port=self.port, group=group, parts=pool.parts, state=pool.state_shape)

    def start(self) -> None:
        """Begin to serve."""
        self._worker.start(self._run)

    def close(self) -> None:
        """End the thread and all links."""
        self._worker.close(lambda: self._stop.put(None))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._askers.socket, zmq.POLLIN)
        poller.register(self._stop.fd, zmq.POLLIN)
        while not self._worker.ends:
            ready = dict(poller.poll(int(_LOOK_S * 1000) if self._jobs else None))
            self._stop.take()
            if self._askers.socket in ready:
                self._take_requests(poller)
            for address, link in list(self._links.items()):
                broken = link.socket in ready and not self._take_rows(address, link)
                if broken or not any(address in job.addresses for job in self._jobs.values()):
                    poller.unregister(self._links.pop(address).socket)
                    link.close()
            for job in list(self._jobs.values()):
                if self._clock() - job.moved_at > self._patience_s:
                    late = ", ".join(sorted(job.addresses))
                    self._end(job, f"nothing has come from {late} for {self._patience_s:g} s")
        for link in self._links.values():
            link.close()
        self._askers.close()

    def _take_requests(self, poller: zmq.Poller) -> None:
        while (received := self._askers.receive()) is not None:
            asker, message = received
            if isinstance(message, WireError):
                log.warning("a request for KV was refused: %s", message)
                self._askers.send(asker, Refusal(message=str(message)))
            elif isinstance(message, Read):
                self._askers.send(asker, self._read(message))
            elif isinstance(message, Pull):
                self._begin(asker, message, poller)
            elif (job := self._jobs.get(message.ticket)) is not None:
                self._end(job, "cancelled")

    def _read(self, read: Read) -> Rows:
        try:
            return Rows(ticket=read.ticket, data=self._pool.gather(read.cuts, read.slots, read.state))
        except EngineError as error:
            log.warning("KV was asked for that is not here: %s", error)
            return Rows(ticket=read.ticket, data=np.zeros(0, dtype=np.uint8), error=str(error))

    def _begin(self, asker: bytes, order: Pull, poller: zmq.Poller) -> None:
        job = _Job(asker=asker, order=order, waiting={}, moved_at=self._clock())
        self._jobs[order.ticket] = job
        for source in order.sources:
            with_state = source.has_state and order.own_state >= 0
            count = max(1, _PIECE_BYTES // max(1, self._pool.width(source.own_cuts)))
            pieces = deque(
                _Piece(
                    source=source,
                    slots=order.slots[at : at + count],
                    own_slots=order.own_slots[at : at + count],
                    with_state=False,
                )
                for at in range(0, len(order.slots), count)
            )
            if with_state:
                none = order.slots[:0]
                pieces.append(_Piece(source=source, slots=none, own_slots=none, with_state=True))
            if not pieces:
                continue
            job.waiting[source.address] = pieces
            if source.address not in self._links:
                link = Link(source.address, get_args(ToAgent), get_args(FromAgent), self._peer_key)
                self._links[source.address] = link
                poller.register(link.socket, zmq.POLLIN)
        for address in list(job.waiting):
            self._ask(job, address)
        self._end_if_done(job)

    def _ask(self, job: _Job, address: str) -> None:
        pieces = job.waiting.get(address)
        while pieces and sum(piece.source.address == address for piece in job.asked.values()) < _AHEAD:
            piece, ticket = pieces.popleft(), next(self._tickets)
            job.asked[ticket] = piece
            state = job.order.state if piece.with_state else -1
            self._links[address].send(Read(ticket=ticket, cuts=piece.source.cuts, slots=piece.slots, state=state))
        if not pieces:
            job.waiting.pop(address, None)

    def _take_rows(self, address: str, link: Link) -> bool:
        """Take what has come by a link. Returns whether the link is still of use; if not, the pulls over it fail."""
        while True:
            try:
                message: FromAgent | None = link.receive()
                if isinstance(message, Refusal):
                    raise WireError(message.message)
            except WireError as error:
                for broken in [job for job in self._jobs.values() if address in job.addresses]:
                    self._end(broken, str(error))
                return False
            if message is None:
                return True
            assert isinstance(message, Rows), message
            job = next((one for one in self._jobs.values() if message.ticket in one.asked), None)
            if job is None:  # of a pull that was given up
                continue
            piece = job.asked.pop(message.ticket)
            failure = message.error or self._write(job, piece, message.data)
            if failure:
                self._end(job, failure)
                continue
            job.moved_at = self._clock()
            self._ask(job, piece.source.address)
            self._end_if_done(job)

    def _write(self, job: _Job, piece: _Piece, data: np.ndarray) -> str:
        """Write what has come. Returns why it cannot be written; "" if it was."""
        try:
            state = job.order.own_state if piece.with_state else -1
            self._pool.scatter(piece.source.own_cuts, piece.own_slots, data, state)
        except EngineError as error:
            return str(error)
        return ""

    def _end_if_done(self, job: _Job) -> None:
        if not job.asked and not job.waiting:
            self._end(job, "")

    def _end(self, job: _Job, error: str) -> None:
        del self._jobs[job.order.ticket]
        self._askers.send(job.asker, Pulled(ticket=job.order.ticket, error=error))
