"""KV by NIXL: the reader takes it out of the other rank's memory by itself, over RDMA, NVLink or what else UCX finds.
The thread of the other agent does nothing. Only this file imports NIXL.

Bytes land in an own buffer, and are copied from there into slots once all of a piece is there. That is because NIXL
cannot take a read back: over UCX's tcp, data was seen to arrive after the transfer's handle was released, and after the
remote agent was removed. So the buffer of a read that was given up is left alone until the transfer has ended. And an
NIXL agent with transfers under way is not destroyed: at a remote that stands still meanwhile, that ends the process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args
from uuid import uuid4

import nixl_cu12 as nixl
import numpy as np
import torch
import zmq

from vlmserve.disaggregation.links import Link
from vlmserve.disaggregation.messages import Describe, Described, FromAgent, Refusal, ToAgent
from vlmserve.disaggregation.pools import KVPool
from vlmserve.disaggregation.transport import Piece
from vlmserve_common.errors import EngineError
from vlmserve_common.transport.wire import WireError

log = logging.getLogger(__name__)

_BUFFER_BYTES = 32 * 2**20
_BUFFERS = 2  # of each remote: one is read into while the other is copied from
_MOST_DESCRIPTORS = 16_384  # of one transfer
_POLL_S, _LOOK_S = 0.001, 0.25
_IDLE_S = 60.0  # after which what belongs to a remote is freed


@dataclass(eq=False, kw_only=True)
class _Transfer:
    """ticket: None if it was given up. size: bytes that come into the buffer."""

    ticket: int | None
    piece: Piece
    buffer: torch.Tensor
    size: int = 0
    handle: Any = None


class NixlTransport:
    """Reads other agents' KV into `pool`, and lets others read this. EngineError if NIXL does not work here.

    clock: in seconds.
    """

    def __init__(self, pool: KVPool, peer_key: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._peer_key, self._clock = pool, peer_key, clock
        self._remotes: dict[str, _Remote] = {}
        self._ending: list[_Remote] = []  # failed ones with transfers that have not ended
        try:
            self._agent = _nixl_agent(serves=True)
            memory = [one for part in pool.layers for one in part] + [one for one in pool.states if one.numel()]
            self._agent.register_memory(memory)
            self._metadata = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's have no other class in common
            raise EngineError(f"NIXL cannot register the KV cache: {error!r}") from error

    def describe(self) -> Described:
        """Tell where the pool is."""
        device, parts = self._pool.device, enumerate(self._pool.layers)
        tensors = [(at, one.shape[1], one.data_ptr(), one[0].nbytes) for at, part in parts for one in part]
        states = [(one.data_ptr(), one[0].nbytes) for one in self._pool.states]
        return Described(
            metadata=np.frombuffer(self._metadata, dtype=np.uint8),
            kind=_kind(device),
            device=device.index or 0,
            tensors=np.array(tensors, dtype=np.int64),
            states=np.array(states, dtype=np.int64).reshape(-1, 2),
            num_slots=len(self._pool.layers[0][0]),
            num_states=len(self._pool.states[0]) if states else 0,
        )

    def most_slots(self, cuts: np.ndarray) -> int:
        """Return how many slots of these own cuts fit a buffer, and a list of descriptors of single slots."""
        tensors = sum(len(self._pool.layers[part]) for part in cuts[:, 0])
        return max(1, min(_BUFFER_BYTES // max(1, self._pool.width(cuts)), _MOST_DESCRIPTORS // max(1, tensors)))

    def read(self, ticket: int, piece: Piece) -> None:
        """Read when a buffer is free."""
        now, address = self._clock(), piece.source.address
        for other in [one for one, remote in self._remotes.items() if now - remote.used_at > _IDLE_S]:
            self._let_go(other)
        if address not in self._remotes:
            self._remotes[address] = _Remote(self._pool, address, self._peer_key)
        self._remotes[address].used_at = now
        self._remotes[address].waiting.append((ticket, piece))

    def poll(self) -> list[tuple[int, str]]:
        """Begin what can begin, and copy what has come to where it belongs."""
        ended: list[tuple[int, str]] = []
        for address, remote in list(self._remotes.items()):
            try:
                remote.poll(ended)
            except Exception as error:  # NIXL's have no other class in common
                why = str(error) if isinstance(error, WireError) else repr(error)
                ended += [(ticket, f"NIXL cannot read from {address}: {why}") for ticket in remote.tickets]
                self._let_go(address)
        self._ending = [remote for remote in self._ending if not remote.has_ended()]
        return ended

    def drop(self, ticket: int) -> None:
        """Give a read up; if it is under way, its buffer stays out of use until it has ended."""
        for remote in self._remotes.values():
            remote.drop(ticket)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Those of links to remotes that are about to describe themselves."""
        return [remote.link.socket for remote in self._remotes.values() if remote.link is not None]

    @property
    def wait_s(self) -> float | None:
        """Less while somebody waits for transfers than while only their end is waited for: NIXL has nothing to wake."""
        if any(remote.link is None and remote.tickets for remote in self._remotes.values()):
            return _POLL_S
        return _LOOK_S if self._ending or any(remote.transfers for remote in self._remotes.values()) else None

    def close(self) -> None:
        """Close all links. Memory is freed with this object, which must not outlive the pool."""
        for address in list(self._remotes):
            self._let_go(address)

    def _let_go(self, address: str) -> None:
        remote = self._remotes.pop(address)
        remote.close()
        self._ending.append(remote)


class _Remote:
    """Another agent: an NIXL agent to read from it, and registered buffers. Both are lost together, if it fails."""

    def __init__(self, pool: KVPool, address: str, peer_key: str | None) -> None:
        self._pool = pool
        self.link: Link | None = Link(address, get_args(ToAgent), get_args(FromAgent), peer_key)
        self.link.send(Describe())
        self.waiting: deque[tuple[int, Piece]] = deque()
        self.transfers: list[_Transfer] = []
        self.used_at = 0.0
        self._free: list[torch.Tensor] = []
        self._agent: Any = None

    @property
    def tickets(self) -> list[int]:
        """Those of all that has not ended."""
        under_way = [one.ticket for one in self.transfers if one.ticket is not None]
        return [*under_way, *(ticket for ticket, _ in self.waiting)]

    def poll(self, ended: list[tuple[int, str]]) -> None:
        """See `NixlTransport.poll`. Whatever it raises, this remote is of no use any more."""
        if self.link is not None and (message := self.link.receive()) is not None:
            self.link.close()
            self.link = None
            self._meet(message)
        for transfer in list(self.transfers):
            self._look(transfer, ended)
        while self.waiting and self._free:
            ticket, piece = self.waiting.popleft()
            transfer = _Transfer(ticket=ticket, piece=piece, buffer=self._free.pop())
            self.transfers.append(transfer)
            try:
                own, theirs = descriptors(self._described, piece, transfer.buffer)
            except EngineError as error:
                self._end(transfer, str(error), ended)
            else:
                self._begin(transfer, own, theirs)

    def drop(self, ticket: int) -> None:
        """See `NixlTransport.drop`."""
        self.waiting = deque(one for one in self.waiting if one[0] != ticket)
        for transfer in self.transfers:
            if transfer.ticket == ticket:
                transfer.ticket = None

    def has_ended(self) -> bool:
        """Whether no transfer is under way any more; a failed one has ended."""
        self.transfers = [one for one in self.transfers if self._is_under_way(one)]
        if not self.transfers:
            self._agent = None  # before the memory that it has registered
        return not self.transfers

    def close(self) -> None:
        """Give everything up."""
        for ticket in self.tickets:
            self.drop(ticket)
        if self.link is not None:
            self.link.close()

    def _meet(self, message: FromAgent) -> None:
        if isinstance(message, Refusal):
            raise WireError(message.message)
        assert isinstance(message, Described), message
        self._described = message
        size = max(_BUFFER_BYTES, self._pool.width(self._pool.whole()), self._pool.state_bytes)
        memory = torch.empty((_BUFFERS, size), dtype=torch.uint8, device=self._pool.device)
        self._free = list(memory)
        self._agent = _nixl_agent(serves=False)
        self._agent.register_memory(memory)
        self._name = self._agent.add_remote_agent(message.metadata.tobytes())

    def _begin(self, transfer: _Transfer, own: np.ndarray, theirs: np.ndarray) -> None:
        agent, about = self._agent, self._described
        mine, there = agent.get_xfer_descs(own, _kind(self._pool.device)), agent.get_xfer_descs(theirs, about.kind)
        transfer.size = int(own[:, 1].sum())
        transfer.handle = agent.initialize_xfer("READ", mine, there, self._name)
        if agent.transfer(transfer.handle) == "ERR":
            raise WireError("the transfer failed")

    def _look(self, transfer: _Transfer, ended: list[tuple[int, str]]) -> None:
        state = self._agent.check_xfer_state(transfer.handle)
        if state == "ERR":
            raise WireError("the transfer failed")
        if state == "PROC":
            return
        transfer.handle.release()
        piece, error = transfer.piece, ""
        if transfer.ticket is not None:
            try:
                data = transfer.buffer[: transfer.size]
                self._pool.scatter(piece.source.own_cuts, piece.own_slots, data, piece.own_state)
            except EngineError as wrong:
                error = str(wrong)
        self._end(transfer, error, ended)

    def _end(self, transfer: _Transfer, error: str, ended: list[tuple[int, str]]) -> None:
        self.transfers.remove(transfer)
        self._free.append(transfer.buffer)
        if transfer.ticket is not None:
            ended.append((transfer.ticket, error))

    def _is_under_way(self, transfer: _Transfer) -> bool:
        try:
            return bool(self._agent.check_xfer_state(transfer.handle) == "PROC")
        except Exception:  # it has failed, or never begun
            return False


def descriptors(about: Described, piece: Piece, buffer: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return places (address, bytes, device) in an own buffer and in a remote agent's memory, uint64 [n, 3] each: those
    of a piece in the order of `KVPool.gather`. Slots in a row are one place where all heads of a part are read.
    EngineError for what is not there."""
    slots, state = piece.slots, piece.state
    if len(slots) and not 0 <= slots.min() <= slots.max() < about.num_slots:
        raise EngineError(f"slots {slots.min()}..{slots.max()} were asked for, and there are {about.num_slots}")
    if not -1 <= state < about.num_states:
        raise EngineError(f"state {state} was asked for, and there are {about.num_states}")
    singles = np.arange(len(slots))
    runs = np.flatnonzero(np.diff(slots, prepend=slots[:1] - 2) != 1)
    blocks: list[tuple[np.ndarray, np.ndarray]] = []  # addresses and sizes, of one tensor each
    for part, first, last in piece.source.cuts.tolist():
        for _, heads, address, width in about.tensors[about.tensors[:, 0] == part].tolist():
            if not 0 <= first < last <= heads:
                raise EngineError(f"heads {first}..{last} of part {part} were asked for, and are not there")
            head = width // heads
            starts = runs if last - first == heads else singles
            counts = np.diff(starts, append=len(slots))
            blocks.append((address + slots[starts] * width + first * head, counts * (last - first) * head))
    if state >= 0:
        whole = about.states[about.states[:, 1] > 0]
        blocks.append((whole[:, 0] + state * whole[:, 1], whole[:, 1]))
    addresses, sizes = (np.concatenate(column) for column in zip(*blocks, strict=True))
    own = buffer.data_ptr() + np.cumsum(sizes) - sizes
    if (total := int(sizes.sum())) > buffer.nbytes:
        raise EngineError(f"{total} bytes of KV were asked for, and a buffer has {buffer.nbytes}")
    return _places(own, sizes, buffer.device.index or 0), _places(addresses, sizes, about.device)


def _places(addresses: np.ndarray, sizes: np.ndarray, device: int) -> np.ndarray:
    return np.stack([addresses, sizes, np.full_like(sizes, device)], axis=1).astype(np.uint64)


def _kind(device: torch.device) -> str:
    return "VRAM" if device.type == "cuda" else "DRAM"


def _nixl_agent(*, serves: bool) -> Any:
    """Return an NIXL agent over UCX. serves: a thread of its own answers where hardware does not."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = nixl.nixl_agent_config(enable_prog_thread=serves, backends=["UCX"])
    return nixl.nixl_agent(uuid4().hex, config)
