"""How servers talk: sealed messages over ZeroMQ.

Every message has a seal, a keyed BLAKE3 digest of all that it consists of. A message that was damaged on its way, or
whose sender has another `--peer-key`, is not read. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import blake3
import zmq

from vlmserve_common.errors import EngineError
from vlmserve_common.transport.wire import Frame, WireCodec, WireError

_CONTEXT = "vlmserve messages between servers"


class SealError(WireError):
    """A message has no seal, or another one than it should have."""


class SealedCodec:
    """Messages of some types as sealed frames. Not thread-safe."""

    def __init__(self, types: Iterable[type], peer_key: str | None) -> None:
        self._codec = WireCodec(types)
        self._key = blake3.blake3((peer_key or "").encode(), derive_key_context=_CONTEXT).digest()

    def encode(self, message: object) -> list[Frame]:
        """Return a message's frames. WireError for a type that this was not made for."""
        frames = self._codec.encode(message)
        return [self._seal(frames), *frames]

    def decode(self, frames: Sequence[Frame]) -> Any:
        """Return the message in some frames; its arrays are views of them. SealError, WireError."""
        if not frames or not hmac.compare_digest(bytes(frames[0]), self._seal(frames[1:])):
            raise SealError("a message's seal is wrong: --peer-key differs, or the message was damaged")
        return self._codec.decode(frames[1:])

    def _seal(self, frames: Sequence[Frame]) -> bytes:
        digest = blake3.blake3(key=self._key)
        for frame in frames:
            digest.update(len(frame).to_bytes(8, "little"))
            digest.update(frame)
        return digest.digest()


def open_socket(kind: int) -> zmq.Socket[bytes]:
    """Open a socket that never waits at its end, and whose messages have no limit in number."""
    socket = zmq.Socket(zmq.Context.instance(), kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.set(option, 0)
    socket.set(zmq.IPV6, 1)
    return socket


def connect(address: str) -> zmq.Socket[bytes]:
    """Open the asking end of a link. The other end may come up later."""
    socket = open_socket(zmq.DEALER)
    socket.connect(address)
    return socket


def listen(host: str, port: int = 0) -> tuple[zmq.Socket[bytes], int]:
    """Open the answering end of links at a port of `host`; 0 is a free one. Return it with the port. EngineError if
    that fails."""
    socket = open_socket(zmq.ROUTER)
    try:
        socket.bind(f"tcp://{tcp_host(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        raise EngineError(f"other servers cannot be listened to at {tcp_host(host)}:{port}: {error}") from error
    return socket, int(bytes(socket.get(zmq.LAST_ENDPOINT)).decode().rpartition(":")[2])


def tcp_host(host: str) -> str:
    """Return a host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


def receive(socket: zmq.Socket[bytes]) -> list[Frame] | None:
    """Return the frames of the next message; None if there is none now."""
    try:
        return [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None


class Worker:
    """A daemon thread that turns until `close`. Its work is given to `start`, once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def ends(self) -> bool:
        """Whether the thread is to end."""
        return self._ending.is_set()

    def start(self, run: Callable[[], None]) -> None:
        """Begin."""
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def close(self, wake: Callable[[], None]) -> None:
        """Let the thread end, and wait for it. wake: makes it look."""
        self._ending.set()
        wake()
        if self._thread is not None:
            self._thread.join()
