"""Arrays that many messages name, and that few of their receivers look at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class HeldArray:
    """An array that its sender holds, for messages that name it again and again.

    Over a channel with `SharedArrays` it lies in a block of its own, from its first message on. Messages bring the
    block's name, and a receiver reads the block when it asks for `array`. So a message costs next to nothing for each
    of them. The block goes with the sender's object, which has to live until receivers have what they need. If the
    block is gone, `array` has no rows.

    array: as the sender has it. load: reads it, in place of `array`.
    """

    __slots__ = ("_array", "_load", "dtype", "shape")

    def __init__(self, array: np.ndarray) -> None:
        self._array: np.ndarray | None = array
        self._load: Callable[[], np.ndarray] | None = None
        self.dtype, self.shape = array.dtype, array.shape

    @classmethod
    def elsewhere(cls, load: Callable[[], np.ndarray], dtype: np.dtype, shape: tuple[int, ...]) -> HeldArray:
        """Return an array that `load` reads when it is asked for. An OSError of `load` means that it is gone."""
        held = cls.__new__(cls)
        held._array, held._load, held.dtype, held.shape = None, load, dtype, shape
        return held

    @property
    def array(self) -> np.ndarray:
        """The array. If it is gone, one without rows."""
        if self._array is None:
            assert self._load is not None
            try:
                self._array = self._load()
            except (OSError, ValueError):
                self._array = np.empty((0, *self.shape[1:]), self.dtype)
        return self._array

    def move(self, array: np.ndarray) -> None:
        """Let an equal array take the place of this one."""
        self._array = array

    @property
    def nbytes(self) -> int:
        """The size of the array, in bytes."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size
