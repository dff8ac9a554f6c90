"""Messages over a pipe between a process and its child."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import Frame, WireCodec, join, split


class MessageChannel:
    """One end of a two-way channel over a pipe. A message is one pipe message: each wakes a thread of the receiver.

    send_types, receive_types: the dataclasses that may come and go. Large arrays go through shared memory. One thread
    may encode and send while another receives.
    """

    def __init__(
        self,
        send: Callable[[Frame], None],
        receive: Callable[[], bytes],
        *,
        send_types: Iterable[type],
        receive_types: Iterable[type],
        shared: SharedArrays,
    ) -> None:
        self._send = send
        self._receive = receive
        self._encoder, self._decoder = WireCodec(send_types, shared), WireCodec(receive_types, shared)

    def encode(self, message: object) -> list[Frame]:
        """A message's frames, to be sent or discarded. WireError for arrays that cannot travel."""
        return self._encoder.encode(message)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send an encoded message; blocks while the pipe is full. Raises what the pipe raises."""
        self._send(join(frames))

    def discard(self, frames: Sequence[Frame]) -> None:
        """Free the shared memory of an encoded message (its first two frames will do) that was not received."""
        self._encoder.discard(frames)

    def receive(self) -> Any:
        """The next message; blocks. Raises what the pipe raises, and WireError."""
        return self._decoder.decode(split(self._receive()))
