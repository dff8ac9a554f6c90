"""Lets the processes of a group find each other, and checks that they fit together before any of them computes.

Each process sends its versions, model and settings. The first one compares them and sends all the result. So every
process ends with the same words if they do not fit.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from vlmserve_common.errors import EngineError, first_line
from vlmserve_common.parallel.group import address_towards

_LOOK_S = 0.05
_READ_S = 5.0  # the most that the first process stays, so that the other ones can read why they do not fit
_WELL = "well"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPlace:
    """The place where a group of `size` meets. address: a path in a private directory, for processes of one machine, or
    HOST:PORT, where the first one listens. ready_by: when waiting ends, by `time.monotonic`. timeout_s: how long the
    wait was, for errors."""

    address: str
    size: int
    ready_by: float
    timeout_s: float

    @property
    def is_file(self) -> bool:
        """Whether all processes are on one machine."""
        return self.address.startswith("/")

    def own_host(self) -> str:
        """Return this machine's address for the group."""
        return "127.0.0.1" if self.is_file else address_towards(split_address(self.address)[0])


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT. EngineError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise EngineError(f"--dist-init-addr is {address!r}; it must be HOST:PORT")
    return host.strip("[]"), int(port)


def meet(
    place: MeetingPlace, rank: int, about: Mapping[str, str], look: Callable[[], object] = lambda: None
) -> dist.Store:
    """Meet all processes, and return the store that they share. about: facts that must be equal, by names for people.
    look: called while waiting; raises an error if waiting is hopeless.

    EngineError if a process is late or differs, or the address cannot be used.
    """
    store = _open(place, rank, look)
    try:
        store.set(_key(rank), json.dumps(dict(about)))
        if rank:
            verdict = _await(store, "verdict", place, f"rank 0 of {place.size}", look).decode()
            if verdict != _WELL:
                with contextlib.suppress(RuntimeError):  # the first one has not waited
                    store.set(_read_key(rank), "")
        else:
            verdict = _compare(store, place, about, look)
            store.set("verdict", verdict)
            if verdict != _WELL and not place.is_file:
                _await_readers(store, place)
    except RuntimeError as error:
        raise EngineError(f"rank {rank} of {place.size} lost {place.address}: {first_line(error)}") from error
    if verdict != _WELL:
        raise EngineError(verdict)
    return store


def _open(place: MeetingPlace, rank: int, look: Callable[[], object]) -> dist.Store:
    if place.is_file:
        return dist.FileStore(place.address, place.size)
    host, port = split_address(place.address)
    if rank:
        _await_listener(place, rank, look)
    left = max(0.1, place.ready_by - time.monotonic())
    try:
        return dist.TCPStore(
            host,
            port,
            place.size,
            is_master=rank == 0,
            timeout=datetime.timedelta(seconds=left),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        what = "cannot listen there" if rank == 0 else "cannot work with who is there"
        raise EngineError(
            f"--dist-init-addr is {place.address}: rank {rank} of {place.size} {what}: {first_line(error)}"
        ) from error


def _await_listener(place: MeetingPlace, rank: int, look: Callable[[], object]) -> None:
    """Wait for the first process. torch's store could wait, too, but it prints its stack at the timeout."""
    while True:
        try:
            left = max(0.1, place.ready_by - time.monotonic())
            with socket.create_connection(split_address(place.address), timeout=left) as found:
                if found.getsockname() != found.getpeername():
                    return
                # The system chose that very port for this end, so this process has found itself. Ended without a
                # farewell, the connection leaves the port to the first one.
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError("nobody listens there")
        except OSError as error:
            look()
            if time.monotonic() > place.ready_by:
                raise EngineError(
                    f"--dist-init-addr is {place.address}: rank {rank} of {place.size} found nobody there in "
                    f"{place.timeout_s:g} s ({error}); --startup-timeout-s allows more"
                ) from error
            time.sleep(_LOOK_S)


def _compare(store: dist.Store, place: MeetingPlace, about: Mapping[str, str], look: Callable[[], object]) -> str:
    try:
        for rank in range(1, place.size):
            other = json.loads(_await(store, _key(rank), place, f"rank {rank} of {place.size}", look))
            for name in {**about, **other}:
                ours, theirs = about.get(name), other.get(name)
                if ours != theirs:
                    return f"rank {rank} differs from rank 0: {name} is {theirs!r} there, and {ours!r} here"
    except EngineError as late:
        return str(late)
    return _WELL


def _await(store: dist.Store, key: str, place: MeetingPlace, who: str, look: Callable[[], object]) -> bytes:
    while not store.check([key]):
        look()
        if time.monotonic() > place.ready_by:
            raise EngineError(f"{who} did not come within {place.timeout_s:g} s; --startup-timeout-s allows more")
        time.sleep(_LOOK_S)
    found: bytes = store.get(key)
    return found


def _await_readers(store: dist.Store, place: MeetingPlace) -> None:
    """Wait until the other processes have read the verdict: the store goes with the first process."""
    there = [rank for rank in range(1, place.size) if store.check([_key(rank)])]
    until = time.monotonic() + _READ_S
    while not all(store.check([_read_key(rank)]) for rank in there) and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _key(rank: int) -> str:
    return f"about/{rank}"


def _read_key(rank: int) -> str:
    return f"read/{rank}"
