"""Hand-over of large arrays between processes on one machine: files ("blocks") in a private tmpfs directory.

Plain files rather than `multiprocessing.shared_memory`: the receiver unlinks, no tracker process guesses at ownership,
and what a crash leaves behind goes with the directory, which belongs to the launcher. A block may have several names
(hard links). A name has exactly one owner: the sender until `put` returns, then the message that holds it, then the
caller of `take` or `discard`. The memory goes with the last name and the last array in it.

Large arrays need no copy if both sides ask for that: `empty` makes one in a block, `put` gives the block one more name,
and `take` maps it. A maker may keep its name and write its next array there once the count of names says that the last
one is no longer used. Fresh pages of tmpfs take longer to get than to fill.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import mmap
import os
import re
import secrets
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

MAPPED_FROM_BYTES = 2**20  # less is copied more quickly than mapped
SPARE_BYTES = 128 * 2**20  # a good value: patches of twenty pictures of 1080p
_BLOCK_NAME = re.compile(r"\d+-[0-9a-f]{8}-\d+")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Block:
    """A mapped file, and one of its names. Both go with this object; the memory, with the last name and mapping. The C
    library maps it: `mmap.mmap` would hold a file descriptor for as long as the mapping lives.

    path: the name, which is this object's alone. nbytes: how much is mapped.
    """

    def __init__(self, path: Path, fd: int, nbytes: int, *, writable: bool) -> None:
        """Map an open file, which is at least so long. OSError when that cannot be done; its name is gone then."""
        self.path = path
        self.nbytes = nbytes
        self._address: int | None = None
        self.reused = False  # its maker writes other arrays to it later
        self._lease: weakref.ref[_Lease] | None = None
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
        self._writable = writable
        self._address = address

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A view of the block's beginning, which keeps it alive."""
        assert self._address is not None
        lease = _Lease(self, self._address, shape, dtype, writable=self._writable)
        self._lease = weakref.ref(lease)
        return np.asarray(lease)

    def is_free(self) -> bool:
        """Whether the block is unused: no array lies in it, and it has no other name."""
        if self._lease is not None and self._lease() is not None:
            return False
        try:
            return os.stat(self.path).st_nlink == 1
        except OSError:  # the folder was cleaned up
            return False

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if self._address is not None:
            _libc.munmap(self._address, self.nbytes)


class _Lease:
    """What an array says its memory belongs to; gone when all views of it are."""

    def __init__(self, block: Block, address: int, shape: tuple[int, ...], dtype: np.dtype, *, writable: bool) -> None:
        self.block = block
        self.__array_interface__: dict[str, Any] = {
            "data": (address, not writable),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }


def block_of(array: np.ndarray) -> Block | None:
    """The block whose beginning an array fills, in one piece; None where it lies anywhere else."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, _Lease) or not array.flags.c_contiguous:
        return None
    start = owner.__array_interface__["data"][0]
    return owner.block if array.ctypes.data == start else None


class SharedArrays:
    """Puts arrays into, and takes them out of, a directory that both processes can see.

    directory: an existing private directory, on tmpfs if there is one; sender and receiver have the same. mapped:
    `take` does not copy large arrays. spare_bytes: how many bytes of its own blocks it keeps for its next arrays.
    Thread-safe.
    """

    def __init__(self, directory: Path, *, mapped: bool = False, spare_bytes: int = 0) -> None:
        self.directory = directory
        self._mapped = mapped
        self._spare_bytes = spare_bytes
        self._word = secrets.token_hex(4)  # makes names unique in this process
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._kept: list[Block] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Make an array like `np.empty`. A large one lies in a block if there is room, so that `put` need not copy it.

        For arrays that live longer than a message half of the file system stays free.
        """
        dtype = np.dtype(dtype)
        nbytes = _size(shape, dtype)
        if nbytes < MAPPED_FROM_BYTES:
            return np.empty(shape, dtype)
        try:
            array = self._reuse(nbytes, shape, dtype)
            return self._make(nbytes, shape, dtype) if array is None else array
        except OSError:
            return np.empty(shape, dtype)

    def put(self, array: np.ndarray) -> str:
        """Hand out an array; returns the block's name. OSError when memory is full.

        Arrays made by `empty` or taken must not be changed afterwards; all other arrays are copied.
        """
        block = block_of(array)
        if block is None and self._spare_bytes:
            copy = self.empty(array.shape, array.dtype)
            block = block_of(copy)
            if block is not None:
                copy[...] = array
        if block is None:
            return self._write(array)
        name = self._new_name()
        os.link(block.path, self.directory / name)
        return name

    def take(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Move a block into a fresh (writable) array and free it. ValueError if it is smaller than that array.

        If `mapped`, a large array is the block itself, read-only, and frees it when it goes.
        """
        path = self._path(name)
        with open(path, "rb", buffering=0) as file:
            try:
                return self._read(file, path, dtype, shape)
            finally:
                path.unlink()  # not before: its maker would use it again

    def look_at(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return the array of a block that stays its holder's (`hold`). OSError if it is gone, ValueError if it is
        smaller."""
        path = self._path(name)
        with open(path, "rb", buffering=0) as file:
            return self._read(file, path, dtype, shape)

    def hold(self, array: np.ndarray) -> tuple[np.ndarray, str]:
        """Return an array in a block of its own, which goes with the array, and the block's name. An array that lies
        in one already is returned as it is. OSError when memory is full."""
        block = block_of(array)
        if block is None or block.reused or block.path.parent != self.directory:
            block = self._new_block(max(1, array.nbytes))
            held = block.array(array.shape, array.dtype)
            held[...] = array
            held.flags.writeable = False
            array = held
        return array, block.path.name

    def _read(self, file: Any, path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        nbytes = _size(shape, dtype)
        if os.fstat(file.fileno()).st_size < nbytes:
            raise ValueError(f"shared block {path.name!r} does not hold {nbytes} bytes")
        if self._mapped and nbytes >= MAPPED_FROM_BYTES and self._has_room(0):
            own = self._own_path()
            with contextlib.suppress(OSError):  # no more mappings or names to be had: copied, then
                os.link(path, own)
                return Block(own, file.fileno(), nbytes, writable=False).array(shape, dtype)
        array = np.empty(shape, dtype)
        target = array.reshape(-1).view(np.uint8).data
        read = 0
        while count := file.readinto(target[read:]) or 0:
            read += count
        return array

    def discard(self, name: str) -> None:
        """Free a block that will not be taken."""
        self._path(name).unlink(missing_ok=True)

    def discard_of(self, pid: int) -> None:
        """Free all blocks that a process put and that were not taken, finished or not. The process and its receivers
        must be gone."""
        for path in self.directory.glob(f"{pid}-*"):
            path.unlink(missing_ok=True)

    @staticmethod
    def is_block_name(name: str) -> bool:
        """Whether a text has the form of a name that `put` gives."""
        return _BLOCK_NAME.fullmatch(name) is not None

    def outstanding(self) -> int:
        """Blocks that were put and not yet taken: zero when idle."""
        return sum(map(self.is_block_name, os.listdir(self.directory)))

    def _reuse(self, nbytes: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """Return an array in an unused kept block of about the same size. Other unused blocks make room."""
        with self._lock:
            free = [block for block in self._kept if block.is_free()]
            fitting = [block for block in free if nbytes <= block.nbytes <= 2 * nbytes]
            if fitting:
                return min(fitting, key=lambda block: block.nbytes).array(shape, dtype)
            held = sum(block.nbytes for block in self._kept)
            for block in free:
                if held + nbytes > self._spare_bytes >= nbytes:
                    self._kept.remove(block)
                    held -= block.nbytes
        return None

    def _make(self, nbytes: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        block = self._new_block(nbytes)
        array = block.array(shape, dtype)  # before anyone may see the block, who would think it free
        with self._lock:
            if sum(one.nbytes for one in self._kept) + nbytes <= self._spare_bytes:
                block.reused = True
                self._kept.append(block)
        return array

    def _new_block(self, nbytes: int) -> Block:
        if not self._has_room(nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
        path = self._own_path()
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # or a write to it would end the process when there is no room
            return Block(path, fd, nbytes, writable=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _has_room(self, nbytes: int) -> bool:
        """Whether half of the file system would still be free."""
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize - nbytes >= found.f_blocks * found.f_frsize // 2

    def _write(self, array: np.ndarray) -> str:
        name = self._new_name()
        path = self.directory / name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(np.ascontiguousarray(array).data.cast("B"))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return name

    def _new_name(self) -> str:
        return f"{os.getpid()}-{self._word}-{next(self._numbers)}"

    def _own_path(self) -> Path:
        """Return a new path that belongs to no message."""
        return self.directory / f"{self._new_name()}.own"

    def _path(self, name: str) -> Path:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"bad shared block name {name!r}")
        return self.directory / name


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
