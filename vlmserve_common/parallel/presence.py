"""Notices ranks of other machines that are gone while nothing is computed.

Each rank keeps a silent connection to the first rank, which ends with either process. The kernel's keep-alive notices a
machine that falls silent. Ranks without such a connection wait for orders, and so notice.
"""

from __future__ import annotations

import secrets
import socket
import time

import torch.distributed as dist

from vlmserve_common.errors import EngineError, RankLostError
from vlmserve_common.parallel.meeting import MeetingPlace, split_address

SILENT_S = 30
"""Seconds after which a machine that does not answer the kernel's questions counts as gone."""
_QUESTIONS = 3
_TOKEN_BYTES, _RANK_BYTES = 16, 4


class Presence:
    """The silent connections of ranks that met at an address. EngineError if a rank is late."""

    def __init__(self, place: MeetingPlace, store: dist.Store, rank: int) -> None:
        self._size = place.size
        self._others: dict[int, socket.socket] = {}
        if rank:
            self._others[0] = _call(place, store, rank)
        else:
            self._listen(place, store)
        for other in self._others.values():
            _ask_when_silent(other)

    @property
    def handles(self) -> list[int]:
        """File descriptors, one of which becomes readable when a rank is gone. The first rank has one for each other
        rank."""
        return [other.fileno() for other in self._others.values()]

    def check(self) -> None:
        """Raise RankLostError if a rank is gone."""
        for rank, other in self._others.items():
            try:
                other.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                pass
            raise RankLostError(f"rank {rank} of {self._size} is gone")

    def close(self) -> None:
        """Close the connections."""
        for other in self._others.values():
            other.close()

    def _listen(self, place: MeetingPlace, store: dist.Store) -> None:
        token = secrets.token_bytes(_TOKEN_BYTES)
        host = place.own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=place.size) as server:
            store.set("presence", f"{host} {server.getsockname()[1]} {token.hex()}")
            while len(self._others) < place.size - 1:
                server.settimeout(max(0.1, place.ready_by - time.monotonic()))
                try:
                    caller, _ = server.accept()
                except TimeoutError:
                    raise EngineError(f"not all ranks came within {place.timeout_s:g} s") from None
                caller.settimeout(5)
                said = _read(caller, _TOKEN_BYTES + _RANK_BYTES)
                if said[:_TOKEN_BYTES] == token:
                    self._others[int.from_bytes(said[_TOKEN_BYTES:])] = caller
                else:
                    caller.close()


def _call(place: MeetingPlace, store: dist.Store, rank: int) -> socket.socket:
    host, port, token = store.get("presence").decode().split()
    left = max(0.1, place.ready_by - time.monotonic())
    try:
        caller = socket.create_connection((host, int(port)), timeout=left)
        caller.sendall(bytes.fromhex(token) + rank.to_bytes(_RANK_BYTES))
    except OSError as error:
        there = split_address(place.address)[0]
        raise EngineError(f"rank {rank} of {place.size} cannot reach {host}:{port} ({there}): {error}") from error
    return caller


def _read(caller: socket.socket, size: int) -> bytes:
    """Read so many bytes, or fewer if the sender stops."""
    said = b""
    try:
        while len(said) < size and (more := caller.recv(size - len(said))):
            said += more
    except OSError:
        pass
    return said


def _ask_when_silent(other: socket.socket) -> None:
    other.settimeout(None)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = SILENT_S // (_QUESTIONS + 1)
    for name, value in (("TCP_KEEPIDLE", every), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", _QUESTIONS)):
        if hasattr(socket, name):  # Linux
            other.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
