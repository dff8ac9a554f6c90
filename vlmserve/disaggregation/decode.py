"""The decode server's side: it orders prompts from prefill servers, and lets its agents take their KV over."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args
from uuid import uuid4

import numpy as np
import zmq

from vlmserve.disaggregation.links import Link, Worker
from vlmserve.disaggregation.messages import (
    PROTOCOL,
    RENEW_S,
    AgentInfo,
    Alive,
    Arrived,
    CancelPull,
    Complete,
    Computed,
    Failed,
    FromAgent,
    Hello,
    KVPoll,
    Order,
    PrefillOrder,
    Pull,
    Pulled,
    Refusal,
    Release,
    Released,
    Renew,
    Source,
    ToAgent,
    ToDecode,
    ToPrefill,
    Welcome,
)
from vlmserve.disaggregation.pools import sources
from vlmserve.ipc.routing import demand_of
from vlmserve.routing.replicas import ReplicaRouter
from vlmserve_common.errors import EngineError
from vlmserve_common.process.wake_up import Mailbox
from vlmserve_common.transport.addresses import split_tcp_url, tcp_url
from vlmserve_common.transport.wire import WireError

log = logging.getLogger(__name__)

_AGAIN_S = 2.0
_LOOK_S = 0.25
_NO_SLOTS = np.zeros(0, dtype=np.int64)


@dataclass(eq=False, kw_only=True)
class _Server:
    """A prefill server. plans: what each own agent reads, by the other side's group of attention; empty until it is
    known that the server fits."""

    url: str
    link: Link
    heard_at: float
    renewed_at: float
    plans: dict[tuple[int, int], tuple[Source, ...]] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return bool(self.plans)


@dataclass(eq=False, kw_only=True)
class KVReceiver:
    """One room. received: tokens for which reading has begun. group: of attention, at the other server. pulls: tickets
    under way, with the number of the agent that has each. tried: URLs of servers that failed."""

    order: Order
    reply: Mailbox[Arrived]
    server: _Server | None = None
    state: KVPoll = KVPoll.BOOTSTRAPPING
    received: int = 0
    group: int = 0
    pulls: dict[int, int] = field(default_factory=dict)
    complete: Complete | None = None
    failure: Failed | None = None
    tried: set[str] = field(default_factory=set)

    @property
    def room(self) -> str:
        """Return its name."""
        return self.order.request.rid

    def move_to(self, state: KVPoll) -> None:
        """Change the state, forward only; a failed one begins anew elsewhere."""
        assert state >= self.state or (self.state is KVPoll.FAILED and not self.pulls), (self.room, self.state, state)
        self.state = state


class KVReceivers:
    """All rooms of a decode server, and the thread that talks with prefill servers and own agents.

    urls: of prefill servers. identity: what must be equal, by names for people. agents: own ones, reached at `host` if
    they name no other. patience_s: silence after which a server is taken for lost. clock: in seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        host: str,
        peer_key: str | None,
        identity: Mapping[str, str],
        agents: Sequence[AgentInfo],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls, self._identity, self._patience_s = tuple(urls), identity, patience_s
        self._clock = clock
        self._peer_key, self._name = peer_key, uuid4().hex
        self._agents = tuple(agents)
        self._own = [
            Link(tcp_url(one.host or host, one.port), get_args(ToAgent), get_args(FromAgent), peer_key)
            for one in agents
        ]
        self._servers: list[_Server] = []
        self._router = ReplicaRouter(len(self._urls))
        self._meet_at = dict.fromkeys(self._urls, 0.0)
        self._said: dict[str, str] = {}  # the last problem with each URL: said once
        self._rooms: dict[str, KVReceiver] = {}
        self._tickets = itertools.count(1)
        self._inbox: Mailbox[Callable[[], None]] = Mailbox()
        self._up = False
        self._worker = Worker("kv-receiver")

    def start(self) -> None:
        """Begin to look for prefill servers."""
        self._worker.start(self._run)

    def close(self) -> None:
        """End the thread and its links."""
        self._worker.close(lambda: self._inbox.put(lambda: None))

    # ------------------------------------------------------------ any thread

    @property
    def up(self) -> bool:
        """Whether a prefill server takes orders."""
        return self._up

    def order(self, order: Order, reply: Mailbox[Arrived]) -> None:
        """Have a prompt computed, and its KV brought here. An `Arrived` comes for it, whatever happens."""
        self._inbox.put(lambda: self._begin(KVReceiver(order=order, reply=reply)))

    def cancel(self, room: str) -> None:
        """Give a room up. Its `Arrived` comes when nothing writes to its slots any more."""
        self._inbox.put(lambda: self._cancel(room))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._worker.ends:
            poller = zmq.Poller()
            links = [*self._own, *(server.link for server in self._servers)]
            for source in (*(link.socket for link in links), self._inbox.fd):
                poller.register(source, zmq.POLLIN)
            poller.poll(int(_LOOK_S * 1000))
            self.turn()
        for link in (*self._own, *(server.link for server in self._servers)):
            link.close()

    def turn(self) -> None:
        """Do all that there is to do now. Only the thread calls this."""
        for do in self._inbox.take():
            do()
        for agent in self._own:
            while (message := agent.receive()) is not None:
                self._take_pulled(message)
        for server in list(self._servers):
            self._take_answers(server)
        self._look()

    def _look(self) -> None:
        """Renew rooms, give silent servers up, and look for those that are not there."""
        now = self._clock()
        for server in list(self._servers):
            if now - server.heard_at > self._patience_s:
                self._lose(server, f"was not heard for {self._patience_s:g} s")
            elif server.is_up and now - server.renewed_at >= RENEW_S:
                server.renewed_at = now
                server.link.send(Renew(rooms=tuple(one.room for one in self._rooms.values() if one.server is server)))
        for url in self._urls:
            if now >= self._meet_at[url] and not any(server.url == url for server in self._servers):
                link = Link(url, get_args(ToPrefill), get_args(ToDecode), self._peer_key)
                server = _Server(url=url, link=link, heard_at=now, renewed_at=now)
                self._servers.append(server)
                server.link.send(Hello(protocol=PROTOCOL, sender=self._name))

    def _lose(self, server: _Server, why: str) -> None:
        self._say(server.url, why)
        self._servers.remove(server)
        server.link.close()
        server.plans = {}
        self._meet_at[server.url] = self._clock() + _AGAIN_S
        self._note_up()
        for one in list(self._rooms.values()):
            if one.server is server:
                self._fail(one, Failed(room=one.room, status=503, message=f"prefill server {server.url} {why}"))

    def _say(self, url: str, what: str) -> None:
        if self._said.get(url) != what:
            self._said[url] = what
            log.warning("prefill server %s %s; its prompts are computed elsewhere", url, what)

    def _note_up(self) -> None:
        self._up = any(server.is_up for server in self._servers)

    # ------------------------------------------------------------ answers

    def _take_answers(self, server: _Server) -> None:
        while server in self._servers:
            try:
                message: ToDecode | None = server.link.receive()
            except WireError as error:
                self._lose(server, f"is not used: {error}")
                return
            if message is None:
                return
            server.heard_at = self._clock()
            if isinstance(message, Welcome):
                self._welcome(server, message)
            elif isinstance(message, Refusal):
                self._lose(server, f"refuses this server: {message.message}")
            elif isinstance(message, Alive):
                for room in message.missing:
                    if (one := self._room_at(server, room)) is not None and one.state < KVPoll.SUCCESS:
                        self._fail(one, Failed(room=room, status=503, message=f"{server.url} has lost the room"))
            elif (one := self._room_at(server, message.room)) is not None:
                self._take(one, message)

    def _room_at(self, server: _Server, room: str) -> KVReceiver | None:
        one = self._rooms.get(room)
        return one if one is not None and one.server is server and one.state is not KVPoll.FAILED else None

    def _welcome(self, server: _Server, welcome: Welcome) -> None:
        if server.is_up:
            return
        if welcome.protocol != PROTOCOL:
            self._lose(server, f"is not used: its protocol is {welcome.protocol}, and this server's {PROTOCOL}")
            return
        for name in {**self._identity, **welcome.identity}:
            ours, theirs = self._identity.get(name), welcome.identity.get(name)
            if ours != theirs:
                self._lose(server, f"is not used: {name} is {theirs} there, and {ours} here")
                return
        host, _ = split_tcp_url(server.url)
        try:
            for group in {agent.group for agent in welcome.agents}:
                others = [agent for agent in welcome.agents if agent.group == group]
                for at, own in enumerate(self._agents):
                    server.plans[group, at] = sources(own, others, host)
        except EngineError as error:
            self._lose(server, f"is not used: {error}")
            return
        self._said.pop(server.url, None)
        self._note_up()
        log.info("prefill server %s takes orders", server.url)
        wanted = self._agents[0].transports[0]
        if any(source.transport != wanted for plan in server.plans.values() for source in plan):
            log.warning("prefill server %s has no %s: its KV comes by tcp", server.url, wanted)

    # ------------------------------------------------------------ rooms

    def _begin(self, one: KVReceiver) -> None:
        assert one.room not in self._rooms, one.room
        self._rooms[one.room] = one
        self._order_somewhere(one)

    def _order_somewhere(self, one: KVReceiver) -> None:
        """Order a prompt from a server that was not tried: the one that has most of it, unless others have much less to
        do."""
        servers = {self._urls.index(server.url): server for server in self._servers if server.is_up}
        among = [number for number, server in servers.items() if server.url not in one.tried]
        if not among:
            why = one.failure or Failed(room=one.room, status=503, message="no prefill server takes orders")
            self._end(one, Arrived(room=one.room, failure=why))
            return
        one.server = servers[self._router.place(demand_of(one.order.request), among)]
        one.state, one.received, one.complete, one.failure = KVPoll.BOOTSTRAPPING, one.order.start, None, None
        one.server.link.send(PrefillOrder(start=one.order.start, request=one.order.request))
        one.move_to(KVPoll.WAITING_FOR_INPUT)

    def _take(self, one: KVReceiver, message: Computed | Complete | Failed | Released) -> None:
        assert one.server is not None, one.room
        if isinstance(message, Failed):
            self._fail(one, message)
        elif isinstance(message, Released):
            if one.state is not KVPoll.SUCCESS:
                return
            if message.held and one.complete is not None:
                self._end(one, Arrived(room=one.room, cached_tokens=one.complete.cached_tokens))
            else:
                one.state = KVPoll.TRANSFERRING  # what was read may be of somebody else
                self._fail(one, Failed(room=one.room, status=503, message=f"{one.server.url} gave the room up"))
        elif isinstance(message, Complete):
            self._completed(one, message)
        else:
            self._computed(one, message)

    def _completed(self, one: KVReceiver, message: Complete) -> None:
        end = one.order.start + len(one.order.own_slots)
        if message.end != end or one.received != end or (message.state < 0) != (one.order.own_state < 0):
            self._fail(one, _nonsense(one, f"KV up to token {message.end}, state {message.state}"))
            return
        one.complete = message
        if message.state >= 0:
            self._pull(one, _NO_SLOTS, _NO_SLOTS, state=message.state)
        self._release_if_done(one)

    def _computed(self, one: KVReceiver, message: Computed) -> None:
        assert one.server is not None, one.room
        start, end = one.order.start, message.start + len(message.slots)
        fits = message.start <= one.received < end <= start + len(one.order.own_slots)
        if not fits or one.complete is not None or (message.group, 0) not in one.server.plans:
            self._fail(one, _nonsense(one, f"tokens {message.start}..{end} of group {message.group}"))
            return
        one.move_to(KVPoll.TRANSFERRING)
        first, one.received, one.group = one.received, end, message.group
        self._pull(one, message.slots[first - message.start :], one.order.own_slots[first - start : end - start])

    def _pull(self, one: KVReceiver, slots: np.ndarray, own_slots: np.ndarray, *, state: int = -1) -> None:
        """Let the agents of the order's group read: KV of some slots, or a state."""
        assert one.server is not None, one.room
        for at, agent in enumerate(self._agents):
            if agent.group != one.order.group:
                continue
            ticket = next(self._tickets)
            pull = Pull(
                ticket=ticket,
                sources=one.server.plans[one.group, at],
                slots=slots,
                own_slots=own_slots,
                state=state,
                own_state=-1 if state < 0 else one.order.own_state,
            )
            one.pulls[ticket] = at
            self._own[at].send(pull)

    def _take_pulled(self, message: FromAgent) -> None:
        assert isinstance(message, Pulled), message
        one = next(one for one in self._rooms.values() if message.ticket in one.pulls)
        del one.pulls[message.ticket]
        if message.error and one.state is not KVPoll.FAILED:
            self._fail(one, Failed(room=one.room, status=503, message=f"its KV did not come: {message.error}"))
        elif one.state is KVPoll.FAILED:
            self._end_if_still(one)
        else:
            self._release_if_done(one)

    def _release_if_done(self, one: KVReceiver) -> None:
        if one.complete is not None and not one.pulls:
            assert one.server is not None, one.room
            one.move_to(KVPoll.SUCCESS)
            one.server.link.send(Release(room=one.room))

    def _cancel(self, room: str) -> None:
        one = self._rooms.get(room)
        if one is not None and one.state is not KVPoll.FAILED:
            one.tried.update(server.url for server in self._servers)
            self._fail(one, Failed(room=room, status=499, message="cancelled"))

    def _fail(self, one: KVReceiver, failure: Failed) -> None:
        """Let a room end without KV, or begin anew elsewhere, once nothing writes to its slots any more."""
        one.failure = failure
        one.move_to(KVPoll.FAILED)
        if one.server is not None:
            one.tried.add(one.server.url)
            if one.server in self._servers:
                one.server.link.send(Release(room=one.room))
        for ticket, at in one.pulls.items():
            self._own[at].send(CancelPull(ticket=ticket))
        self._end_if_still(one)

    def _end_if_still(self, one: KVReceiver) -> None:
        if one.pulls:
            return
        assert one.failure is not None, one.room
        if one.failure.status < 500:  # the request itself is at fault, or gone
            self._end(one, Arrived(room=one.room, failure=one.failure))
        else:
            log.warning("room %s: %s", one.room, one.failure.message)
            self._order_somewhere(one)

    def _end(self, one: KVReceiver, arrived: Arrived) -> None:
        self._router.end(one.room)
        del self._rooms[one.room]
        one.reply.put(arrived)


def _nonsense(one: KVReceiver, what: str) -> Failed:
    assert one.server is not None, one.room
    message = f"{one.server.url} told of {what}, which does not belong to the order"
    return Failed(room=one.room, status=502, message=message)
