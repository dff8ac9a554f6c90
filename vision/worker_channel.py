"""What an encoder worker and its keeper say to each other, and how. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmserve.common.shm import SharedArrays
from vlmserve.common.wire import Frame, WireCodec


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeWork:
    """A batch. grids: (height, width) of its temporal patches; pixels: float32 [P, patch elements], theirs in order."""

    number: int
    grids: tuple[tuple[int, int], ...]
    pixels: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeDone:
    """rows: of each temporal patch [n, row width], of `dtype` (see `common/tensors.py`). error: why there are none."""

    number: int
    rows: tuple[np.ndarray, ...] = ()
    dtype: str = ""
    error: str = ""


class MessageChannel:
    """One end of a two-way channel over a pipe: a message is a pipe message with the number of its frames, and them.

    Large arrays go through shared memory. One thread may encode and send while another receives.
    """

    def __init__(self, send: Callable[[Frame], None], receive: Callable[[], bytes], shared: SharedArrays) -> None:
        self._send = send
        self._receive = receive
        self._encoder, self._decoder = (WireCodec((EncodeWork, EncodeDone), shared) for _ in range(2))

    def encode(self, message: EncodeWork | EncodeDone) -> list[Frame]:
        """A message's frames, to be sent or discarded. WireError for arrays that cannot travel."""
        return self._encoder.encode(message)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send an encoded message; blocks while the pipe is full. Raises what the pipe raises."""
        self._send(len(frames).to_bytes(4, "little"))
        for frame in frames:
            self._send(frame)

    def discard(self, frames: Sequence[Frame]) -> None:
        """Free the shared memory of an encoded message (its first two frames will do) that was not received."""
        self._encoder.discard(frames)

    def receive(self) -> Any:
        """The next message; blocks. Raises what the pipe raises, and WireError."""
        count = int.from_bytes(self._receive(), "little")
        return self._decoder.decode([self._receive() for _ in range(count)])
