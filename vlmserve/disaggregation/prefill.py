"""The prefill server's side: it takes orders for prompts, and tells where their KV is as it is computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

import zmq

from vlmserve.disaggregation.links import Answering, Worker
from vlmserve.disaggregation.messages import (
    LEASE_S,
    PROTOCOL,
    RENEW_S,
    AgentInfo,
    Alive,
    Complete,
    Computed,
    Failed,
    Hello,
    PrefillOrder,
    Refusal,
    Release,
    Released,
    Renew,
    ToDecode,
    ToPrefill,
    Welcome,
)
from vlmserve.ipc.messages import AbortReq, BatchTokenOutput, SchedulerOutput, TokenizedGenerateReqInput, TokenOutput
from vlmserve_common.process.wake_up import Mailbox
from vlmserve_common.transport.wire import WireError

log = logging.getLogger(__name__)

_LAST_WORDS_MS = 500
Told: TypeAlias = Computed | Complete | Failed


@dataclass(eq=False, kw_only=True)
class _Room:
    asker: bytes
    renewed_at: float


class KVSender:
    """Rooms of a prefill server, and the thread that talks with decode servers, at `host` and `port` (0: a free one).

    The scheduler's thread takes orders with `take`, and tells what is computed; the thread does the rest. A room lasts
    from its order until its release, its failure, or the end of its lease; then the scheduler gets an AbortReq for it.
    identity, agents: see `Welcome`. max_prompt: in tokens. clock: in seconds.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int = 0,
        peer_key: str | None,
        identity: Mapping[str, str],
        agents: Sequence[AgentInfo],
        max_prompt: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._welcome = Welcome(protocol=PROTOCOL, identity=dict(identity), agents=tuple(agents), max_prompt=max_prompt)
        self._askers = Answering(host, port, get_args(ToDecode), get_args(ToPrefill), peer_key)
        self.port = self._askers.port
        self._clock = clock
        self._rooms: dict[str, _Room] = {}  # of the thread
        self._senders: dict[bytes, str] = {}  # by their latest link
        self._known: dict[str, int] = {}  # of the scheduler's thread: the first token that is wanted of each
        self._inbox: Mailbox[PrefillOrder | AbortReq] = Mailbox()
        self._outbox: Mailbox[Told | None] = Mailbox()
        self._worker = Worker("kv-sender")

    def start(self) -> None:
        """Begin to take orders."""
        self._worker.start(self._run)

    def close(self) -> None:
        """End the thread and its links."""
        self._worker.close(lambda: self._outbox.put(None))

    # ------------------------------------------------------------ the scheduler's thread

    @property
    def fd(self) -> int:
        """Readable when `take` has something."""
        return self._inbox.fd

    def take(self) -> list[TokenizedGenerateReqInput | AbortReq]:
        """Return prompts to compute, and rooms that nobody wants any more."""
        messages: list[TokenizedGenerateReqInput | AbortReq] = []
        for message in self._inbox.take():
            if isinstance(message, PrefillOrder):
                self._known[message.request.rid] = message.start
                messages.append(message.request)
            elif message.rid in self._known:
                del self._known[message.rid]
                messages.append(message)
        return messages

    def is_room(self, rid: str) -> bool:
        """Return True if a request is a room's."""
        return rid in self._known

    def start_of(self, room: str) -> int:
        """Return the first token that is wanted of a room."""
        return self._known[room]

    def tell(self, message: Told) -> None:
        """Tell the decode server of a room."""
        self._outbox.put(message)

    def noting(self, send: Callable[[SchedulerOutput], None]) -> Callable[[SchedulerOutput], None]:
        """Return a `send` for outputs of the schedulers, which keeps those of rooms and tells their failures."""

        def send_others(output: SchedulerOutput) -> None:
            if not isinstance(output, BatchTokenOutput):
                send(output)
                return
            others = tuple(one for one in output.outputs if not self._takes(one))
            if others:
                send(replace(output, outputs=others))

        return send_others

    def _takes(self, output: TokenOutput) -> bool:
        if output.rid not in self._known:
            return False
        reason = output.finish_reason
        if reason is not None:
            del self._known[output.rid]
            message = reason.message or f"the prompt ended with {reason.type!r}"
            self.tell(Failed(room=output.rid, status=reason.status, message=message, param=reason.param))
        return True

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._askers.socket, zmq.POLLIN)
        poller.register(self._outbox.fd, zmq.POLLIN)
        while not self._worker.ends:
            poller.poll(int(RENEW_S * 1000) if self._rooms else None)
            self.turn()
        for asker in self._senders:  # or they would find out by waiting
            self._askers.send(asker, Refusal(message="it is ending"))
        self._askers.close(linger_ms=_LAST_WORDS_MS)

    def turn(self) -> None:
        """Do all that there is to do now. Only the thread calls this."""
        for message in self._outbox.take():
            if message is not None and (room := self._rooms.get(message.room)) is not None:
                self._askers.send(room.asker, message)
                if isinstance(message, Failed):
                    del self._rooms[message.room]
        while (received := self._askers.receive()) is not None:
            asker, order = received
            if isinstance(order, WireError):
                log.warning("a message of a decode server was refused: %s", order)
                self._askers.send(asker, Refusal(message=str(order)))
            elif (answer := self._handle(asker, order)) is not None:
                self._askers.send(asker, answer)
        for name, room in list(self._rooms.items()):
            if self._clock() - room.renewed_at > LEASE_S:
                log.warning("room %s is given up: its decode server was not heard for %g s", name, LEASE_S)
                self._forget(name)

    def _handle(self, asker: bytes, message: ToPrefill) -> ToDecode | None:
        if isinstance(message, Hello):
            before = [link for link, sender in self._senders.items() if sender == message.sender and link != asker]
            for name in [name for name, room in self._rooms.items() if room.asker in before]:
                self._forget(name)
            self._senders = {link: name for link, name in self._senders.items() if link not in before}
            self._senders[asker] = message.sender
            return self._welcome
        if isinstance(message, Renew):
            own = [name for name in message.rooms if self._is_of(name, asker)]
            for name in own:
                self._rooms[name].renewed_at = self._clock()
            return Alive(missing=tuple(name for name in message.rooms if name not in own))
        if isinstance(message, Release):
            held = self._is_of(message.room, asker)
            if held:
                self._forget(message.room)
            return Released(room=message.room, held=held)
        return self._open(asker, message)

    def _is_of(self, name: str, asker: bytes) -> bool:
        """Return True for a room of this link: messages to a link that broke are lost."""
        return name in self._rooms and self._rooms[name].asker == asker

    def _open(self, asker: bytes, order: PrefillOrder) -> Failed | None:
        name, length = order.request.rid, len(order.request.input_ids)
        if name in self._rooms:
            return Failed(room=name, status=400, message=f"room {name!r} is in use")
        if not 0 <= order.start < length <= self._welcome.max_prompt:
            why = f"tokens {order.start}..{length} were ordered; a prompt here has at most {self._welcome.max_prompt}"
            return Failed(room=name, status=500, message=why)
        self._rooms[name] = _Room(asker=asker, renewed_at=self._clock())
        self._inbox.put(order)
        return None

    def _forget(self, name: str) -> None:
        del self._rooms[name]
        self._inbox.put(AbortReq(rid=name, finished=True))
