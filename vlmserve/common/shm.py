"""Hand-over of large arrays between processes on one machine: one file per array in a private tmpfs directory.

Plain files rather than `multiprocessing.shared_memory`: the receiver unlinks as soon as it has opened, no tracker
process guesses at ownership, and what a crash leaves behind goes with the directory, which belongs to the launcher.
A file has exactly one owner: the sender until `put` returns, then the message that names it, then whoever calls
`take` or `discard`.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from pathlib import Path

import numpy as np

_BLOCK_NAME = re.compile(r"\d+-[0-9a-f]{8}-\d+")


class SharedArrays:
    """Puts arrays into, and takes them out of, a directory that both processes can see.

    directory: an existing private directory, on tmpfs where there is one. Thread-safe.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._word = secrets.token_hex(4)  # sets names apart from those of others in this process
        self._numbers = itertools.count()

    def put(self, array: np.ndarray) -> str:
        """Copy an array's bytes out of this process; returns the block's name. OSError when memory is full."""
        name = f"{os.getpid()}-{self._word}-{next(self._numbers)}"
        path = self.directory / name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(np.ascontiguousarray(array).data.cast("B"))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return name

    def take(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Move a block into a fresh (writable) array and free it. ValueError if it is not as large as that array.

        A copy rather than a mapping: a mapping would hold a file descriptor for as long as the array lives.
        """
        path = self._path(name)
        with open(path, "rb", buffering=0) as file:
            path.unlink()
            array = np.empty(shape, dtype=dtype)
            target = array.reshape(-1).view(np.uint8).data
            read = 0
            while count := file.readinto(target[read:]) or 0:
                read += count
            if read != array.nbytes or file.read(1):
                raise ValueError(f"shared block {name!r} does not hold {array.nbytes} bytes")
        return array

    def discard(self, name: str) -> None:
        """Free a block that nobody will take."""
        self._path(name).unlink(missing_ok=True)

    def discard_of(self, pid: int) -> None:
        """Free all blocks that a process put and nobody took, finished or not. It must be gone, as must whoever it put
        them for."""
        for path in self.directory.glob(f"{pid}-*"):
            path.unlink(missing_ok=True)

    @staticmethod
    def is_block_name(name: str) -> bool:
        """Whether a text has the form of a name that `put` gives."""
        return _BLOCK_NAME.fullmatch(name) is not None

    def outstanding(self) -> int:
        """Blocks that were put and not yet taken: zero when idle."""
        return len(os.listdir(self.directory))

    def _path(self, name: str) -> Path:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"bad shared block name {name!r}")
        return self.directory / name
