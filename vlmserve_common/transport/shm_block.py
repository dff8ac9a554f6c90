"""A file in shared memory, mapped, and the arrays that lie in it.

The C library's own calls rather than `mmap.mmap`, which holds a file descriptor for as long as the mapping lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Block:
    """A mapped file, and one of its names. Both go with this object; the memory, with the last name and mapping.

    path: the name, which is this object's alone. nbytes: how much is mapped.
    """

    def __init__(self, path: Path, fd: int, nbytes: int, *, writable: bool) -> None:
        """Map an open file, which is at least so long. OSError when that cannot be done; its name is gone then."""
        self.path = path
        self.nbytes = nbytes
        self._address: int | None = None
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
