"""Two engines without models, one of which computes the prompts of the other: the real schedulers, rooms and links,
over a network that does what a test says."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import zmq

from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.disaggregation import links
from vlmserve.disaggregation.decode import KVReceivers
from vlmserve.disaggregation.messages import AgentInfo, CancelPull, LayerPart, Pull, Pulled
from vlmserve.disaggregation.prefill import KVSender

PREFILL, AGENT = "tcp://prefill:1", "tcp://here:2"
PATIENCE_S = 10.0
FAULTS = ("lose", "double", "swap", "silent")


@dataclass
class _Frame:
    buffer: memoryview


class Network:
    """Sockets by name. Messages lie in `wires` until `deliver`, by the pair of sender and receiver."""

    def __init__(self) -> None:
        self.sockets: dict[str, FakeSocket] = {}
        self.hosts: dict[str, FakeSocket] = {}
        self.wires: dict[tuple[str, str], deque[list[bytes]]] = {}
        self.names = 0

    def open(self, _kind: int) -> FakeSocket:
        self.names += 1
        return FakeSocket(self, f"socket {self.names}")

    def wire(self, sender: str, receiver: str) -> deque[list[bytes]]:
        return self.wires.setdefault((sender, receiver), deque())

    def deliver(self, wire: tuple[str, str]) -> None:
        """Let the first message of a wire arrive."""
        frames = self.wires[wire].popleft()
        if wire[1] in self.sockets:
            self.sockets[wire[1]].inbox.append(frames)

    def deliver_all(self) -> None:
        for wire in list(self.wires):
            while self.wires[wire]:
                self.deliver(wire)


class FakeSocket:
    """As far as `links` uses a ZeroMQ socket."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.inbox: deque[list[bytes]] = deque()
        self.peer: str | None = None
        network.sockets[name] = self

    def bind(self, address: str) -> None:
        host = address.removeprefix("tcp://").rpartition(":")[0]
        self.network.hosts[host] = self

    def connect(self, address: str) -> None:
        self.peer = address.removeprefix("tcp://").rpartition(":")[0]

    def get(self, _option: int) -> bytes:
        return b"tcp://anywhere:1"

    def send_multipart(self, frames, *_flags, **_how) -> None:
        frames = [bytes(frame) for frame in frames]
        if self.peer is None:  # the first frame says to whom
            self.network.wire(self.name, frames[0].decode()).append(frames[1:])
        else:
            there = self.network.hosts[self.peer]
            self.network.wire(self.name, there.name).append([self.name.encode(), *frames])

    def recv_multipart(self, *_flags, **_how) -> list[_Frame]:
        if not self.inbox:
            raise zmq.Again
        return [_Frame(memoryview(bytearray(frame))) for frame in self.inbox.popleft()]

    def close(self, _linger_ms: int = 0) -> None:
        del self.network.sockets[self.name]


@dataclass
class FakeAgent:
    """Copies what fake workers hold, a token at a time. of, to: engines. late: pulls that are under way."""

    answering: links.Answering
    of: Rig
    to: Rig
    late: dict[int, tuple[bytes, Pull, int]] = field(default_factory=dict)

    def take(self) -> None:
        while (received := self.answering.receive()) is not None:
            asker, message = received
            if isinstance(message, Pull):
                self.late[message.ticket] = (asker, message, 0)
            elif isinstance(message, CancelPull) and message.ticket in self.late:
                asker, _, _ = self.late.pop(message.ticket)
                self.answering.send(asker, Pulled(ticket=message.ticket, error="cancelled"))

    def copy(self, ticket: int) -> None:
        """Copy the next token of a pull, or its state."""
        asker, pull, at = self.late[ticket]
        if at < len(pull.slots):
            self.to.worker.kv[int(pull.own_slots[at])] = self.of.worker.kv[int(pull.slots[at])]
            self.late[ticket] = asker, pull, at + 1
            return
        if pull.state >= 0:
            self.to.worker.states[pull.own_state] = self.of.worker.states[pull.state]
        del self.late[ticket]
        self.answering.send(asker, Pulled(ticket=ticket))


class Pair:
    """prefill computes the prompts of decode. now: of all clocks."""

    def __init__(self, prefill: Knobs, decode: Knobs, monkeypatch, *, there: str = "one", here: str = "one") -> None:
        self.network, self.now = Network(), 0.0
        monkeypatch.setattr(links, "_open", self.network.open)
        about = AgentInfo(host="here", port=2, group=0, parts=(LayerPart(layer=0, first=0, heads=1),))
        about = replace(about, state="" if decode.snapshots is None else "one")
        self.sender = KVSender(
            host="prefill",
            port=1,
            peer_key="key",
            identity={"model": there},
            agents=[about],
            max_prompt=min(prefill.context, prefill.pool - prefill.page),
            clock=lambda: self.now,
        )
        answering = links.Answering("here", 2, (Pulled,), (Pull, CancelPull), "key")
        self.receivers = KVReceivers(
            [PREFILL],
            host="here",
            peer_key="key",
            identity={"model": here},
            agents=[about],
            patience_s=PATIENCE_S,
            clock=lambda: self.now,
        )
        self.prefill, self.decode = Rig(prefill, sender=self.sender), Rig(decode, receivers=self.receivers)
        self.agent = FakeAgent(answering, self.prefill, self.decode)

    def turn(self) -> None:
        """A turn of everything, which takes a second, on a network in order."""
        self.now += 1.0
        self.decode.step()
        self.decode.encode()
        self.others_finish()

    def others_finish(self) -> None:
        """All but the decoding engine do a turn, with all that has come."""
        self._others()
        self.network.deliver_all()
        for ticket in list(self.agent.late):
            while ticket in self.agent.late:
                self.agent.copy(ticket)
        self.network.deliver_all()

    def _others(self) -> None:
        self.prefill.step()
        self.prefill.encode()
        self.receivers.turn()
        self.sender.turn()
        self.agent.take()

    def run(self, *messages, limit: int = 400) -> None:
        """Answer these messages, and everything before."""
        self.decode.handle(*messages)
        while not (self.decode.loop.is_idle() and self.prefill.loop.is_idle()):
            self.turn()
            limit -= 1
            assert limit, "nothing gets on"

    def meet(self) -> None:
        """Let the servers find each other."""
        while not self.receivers.up:
            self.turn()
            assert self.now < PATIENCE_S

    def disturbed_turn(self, dice: random.Random, trouble: float) -> None:
        """A turn of one engine and a few of the other one, in which not all messages arrive. trouble: how likely it is
        that a message is lost, doubled or overtaken by another one, that nothing arrives, or that agents do nothing."""
        self.now += 1.0
        self.decode.step()
        if dice.random() < 0.5:
            self.decode.encode()
        for _ in range(dice.randint(0, 4)):
            self._others()
            self._disturb(dice, trouble)
            for ticket in list(self.agent.late):
                for _ in range(dice.choice((0, 4, 40))):
                    if ticket in self.agent.late and dice.random() >= trouble:
                        self.agent.copy(ticket)

    def _disturb(self, dice: random.Random, trouble: float) -> None:
        def fault(what: str) -> bool:
            return dice.random() < trouble / 2 and dice.choice(FAULTS) == what

        own = self.network.hosts["here"].name
        for wire, messages in self.network.wires.items():
            if own in wire:  # a server's own agents are not far
                continue
            if messages and fault("lose"):
                messages.popleft()
            if messages and fault("double"):
                messages.appendleft(messages[0])
            if len(messages) > 1 and fault("swap"):
                messages.rotate(1)
        if not fault("silent"):
            for wire in list(self.network.wires):
                for _ in range(dice.randint(0, len(self.network.wires[wire]))):
                    self.network.deliver(wire)
