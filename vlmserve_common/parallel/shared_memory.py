"""Collectives of processes on one machine through memory that they share; see `kernels/cpp/exchange.cpp`.

A layer's sums are small, and there are many: a socket's latency would be most of a step on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import mmap
import os
import secrets
from ctypes import c_int32, c_int64, c_void_p

import torch
import torch.distributed as dist

from vlmserve_common.kernels.library import active

_SEAT_BYTES = 128
_SLOT_BYTES = 256 * 1024  # stays in a core's cache
_WATCH_US = 200  # then a process that waits sleeps
_TOKEN_BYTES = 16


class SharedMemory:
    """Collectives of process number `rank` of `size`; made by `open_shared_memory`. ConnectionError if a process is
    gone, or late."""

    def __init__(self, memory: mmap.mmap, pids: list[int], rank: int, timeout: datetime.timedelta) -> None:
        self.rank, self.size = rank, len(pids)
        self._memory = memory  # which has to outlive its address
        self._pidfds = (c_int32 * self.size)(*map(os.pidfd_open, pids))
        self._group = _Group(
            ctypes.addressof(ctypes.c_char.from_buffer(memory)),
            ctypes.addressof(self._pidfds),
            _SLOT_BYTES,
            rank,
            self.size,
            _WATCH_US,
            int(timeout.total_seconds() * 1000),
        )
        self._closed = False
        self._lib = active()

    @property
    def address(self) -> int:
        """The address of the library's `Group`, valid as long as this object lives."""
        return ctypes.addressof(self._group)

    def can_add(self, x: torch.Tensor) -> bool:
        """Return whether `all_reduce` takes such a tensor."""
        return x.dtype in (torch.float32, torch.bfloat16)

    def all_reduce(self, x: torch.Tensor) -> None:
        """See `Collectives`; added in float32, in the order of the processes, and rounded once."""
        own, narrow = x.data_ptr(), int(x.dtype == torch.bfloat16)
        self.check(self._call("vs_all_reduce", own, x.numel(), narrow, None, own))

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy the first process's x to all processes, into x's memory; x is contiguous."""
        self.check(self._call("vs_broadcast", x.data_ptr(), x.nbytes, 0))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See `Collectives`."""
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape)) if self.rank == 0 else None
        self.check(self._call("vs_gather", x.data_ptr(), x.nbytes, None if parts is None else parts.data_ptr()))
        return [] if parts is None else list(parts)

    def close(self) -> None:
        """Leave; the other processes see that this one is gone."""
        if not self._closed:
            self._closed = True
            self._call("vs_leave")
            for pidfd in self._pidfds:
                os.close(pidfd)

    def _call(self, name: str, *given: object) -> int:
        assert self._lib is not None
        result: int = getattr(self._lib, name)(ctypes.byref(self._group), *given)
        return result

    @staticmethod
    def check(lost: int) -> None:
        """Raise ConnectionError unless the library returned 0."""
        if lost > 0:
            raise ConnectionError(f"number {lost - 1} of them is gone")
        if lost < 0:
            raise ConnectionError("it did not come in time")


def open_shared_memory(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> SharedMemory | None:
    """Open the memory of a group, once all its processes have called this. timeout: of an exchange. store: the group's
    own.

    Returns None at all processes if one of them is on another machine, has no operators, or cannot see the end of
    another process.
    """
    with contextlib.ExitStack() as stack:
        found = _make(store, size, stack) if rank == 0 else _find(store, size)
        store.set(f"shared/{rank}", str(os.getpid() if found is not None else 0))
        pids = [int(store.get(f"shared/{other}")) for other in range(size)]
        if found is None or 0 in pids:
            return None
        return SharedMemory(found, pids, rank, timeout)


def _size(size: int) -> int:
    return size * (_SEAT_BYTES + 2 * _SLOT_BYTES) + _TOKEN_BYTES


def _check_watching() -> None:
    """Raise OSError or AttributeError if a process cannot see another one end: pidfd_open needs Linux 5.3, and some
    containers forbid it."""
    os.close(os.pidfd_open(os.getpid()))


def _make(store: dist.Store, size: int, stack: contextlib.ExitStack) -> mmap.mmap | None:
    """Make the memory at the first process. stack: ends when all processes have opened it."""
    made = None
    where = ""
    with contextlib.suppress(OSError, AttributeError):  # not of Linux
        if active() is not None:
            _check_watching()
            file = os.memfd_create("vlmserve-ranks")
            stack.callback(os.close, file)
            os.ftruncate(file, _size(size))
            made = mmap.mmap(file, _size(size))
            token = secrets.token_bytes(_TOKEN_BYTES)
            made[-_TOKEN_BYTES:] = token
            where = f"/proc/{os.getpid()}/fd/{file} {token.hex()}"
    store.set("shared", where)
    return made


def _find(store: dist.Store, size: int) -> mmap.mmap | None:
    """Open the first process's memory; None if it cannot be reached from here. A token distinguishes it from a file of
    the same name on another machine."""
    where, _, token = store.get("shared").decode().partition(" ")
    if not where or active() is None:
        return None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        _check_watching()
        file = os.open(where, os.O_RDWR)
        try:
            found = mmap.mmap(file, _size(size))
        finally:
            os.close(file)
        return found if found[-_TOKEN_BYTES:] == bytes.fromhex(token) else None
    return None


class _Group(ctypes.Structure):
    _fields_ = [
        ("memory", c_void_p),
        ("pidfds", c_void_p),
        ("slot_bytes", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
        ("watch_us", c_int32),
        ("timeout_ms", c_int64),
    ]
