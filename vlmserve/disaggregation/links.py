"""How servers talk: numbered, sealed messages over ZeroMQ.

A message's seal is a keyed BLAKE3 digest of all that it consists of. What was damaged on its way, or comes from
somebody with another `--peer-key`, is not read. Numbers show that a message was lost or doubled: then the link is of no
use any more. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import blake3
import zmq

from vlmserve_common.errors import EngineError
from vlmserve_common.transport.addresses import tcp_url
from vlmserve_common.transport.wire import Frame, WireCodec, WireError

log = logging.getLogger(__name__)

_CONTEXT = "vlmserve messages between servers"
_NUMBER_BYTES = 8
_BROKEN = -1  # in place of the next message's number
_LONGEST_PAUSE_MS = 2000  # between two tries to connect
_MOST_ASKERS = 4096  # whose numbers are known; a link that was silent for longest is forgotten first


class SealedCodec:
    """Messages of some types as numbered and sealed frames. Not thread-safe."""

    def __init__(self, types: Iterable[type], peer_key: str | None) -> None:
        self._codec = WireCodec(types)
        self._key = blake3.blake3((peer_key or "").encode(), derive_key_context=_CONTEXT).digest()

    def encode(self, number: int, message: object) -> list[Frame]:
        """Return a message's frames. WireError for a type that this was not made for."""
        frames = [number.to_bytes(_NUMBER_BYTES, "little"), *self._codec.encode(message)]
        return [self._seal(frames), *frames]

    def decode(self, number: int, frames: Sequence[Frame]) -> Any:
        """Return the message of this number in some frames; its arrays are views of them. WireError."""
        if len(frames) < 2 or not hmac.compare_digest(bytes(frames[0]), self._seal(frames[1:])):
            raise WireError("a message's seal is wrong: --peer-key differs, or the message was damaged")
        found = int.from_bytes(bytes(frames[1]), "little")
        if found != number:
            raise WireError(f"message {found} has come, and {number} is the next one: messages were lost or doubled")
        return self._codec.decode(frames[2:])

    def _seal(self, frames: Sequence[Frame]) -> bytes:
        digest = blake3.blake3(key=self._key)
        for frame in frames:
            digest.update(len(frame).to_bytes(8, "little"))
            digest.update(frame)
        return digest.digest()


class Link:
    """The asking end of a link to `address`, whose other end may come up later. sends, takes: types of messages."""

    def __init__(self, address: str, sends: Iterable[type], takes: Iterable[type], peer_key: str | None) -> None:
        self._sends, self._takes = SealedCodec(sends, peer_key), SealedCodec(takes, peer_key)
        self._sent = self._taken = 0
        self.socket = _open(zmq.DEALER)
        self.socket.connect(address)

    def send(self, message: object) -> None:
        """Send a message, or keep it until there is a connection."""
        self.socket.send_multipart(self._sends.encode(self._sent, message), zmq.NOBLOCK, copy=False)
        self._sent += 1

    def receive(self) -> Any | None:
        """Return the next message; None if there is none now. WireError for one that cannot be taken: the link is of no
        use any more."""
        frames = _receive(self.socket)
        if frames is None:
            return None
        self._taken += 1
        return self._takes.decode(self._taken - 1, frames)

    def close(self) -> None:
        """End the link; what was not sent is lost."""
        self.socket.close()


class Answering:
    """The answering end of any number of links, at `host` and `port` (0: a free one). EngineError if that fails."""

    def __init__(
        self, host: str, port: int, sends: Iterable[type], takes: Iterable[type], peer_key: str | None
    ) -> None:
        self._sends, self._takes = SealedCodec(sends, peer_key), SealedCodec(takes, peer_key)
        self._sent: OrderedDict[bytes, int] = OrderedDict()
        self._taken: OrderedDict[bytes, int] = OrderedDict()
        self.socket = _open(zmq.ROUTER)
        try:
            self.socket.bind(tcp_url(host, port or "*"))
        except zmq.ZMQError as error:
            raise EngineError(f"other servers cannot be listened to at {tcp_url(host, port)}: {error}") from error
        self.port = int(bytes(self.socket.get(zmq.LAST_ENDPOINT)).decode().rpartition(":")[2])

    def send(self, asker: bytes, message: object) -> None:
        """Send a message to one end; it is lost if that is gone."""
        number = self._sent.pop(asker, 0)
        self._sent[asker] = number + 1
        _forget_oldest(self._sent)
        frames = self._sends.encode(number, message)
        self.socket.send_multipart([asker, *frames], zmq.NOBLOCK, copy=False)

    def receive(self) -> tuple[bytes, Any] | None:
        """Return the next message and who has sent it; a WireError in place of one that cannot be taken and of all that
        follow it. None if there is none now."""
        while (frames := _receive(self.socket)) is not None:
            asker = bytes(frames[0])
            number = self._taken.pop(asker, 0)
            if number == _BROKEN:
                self._taken[asker] = _BROKEN
                continue
            try:
                self._taken[asker] = number + 1
                return asker, self._takes.decode(number, frames[1:])
            except WireError as error:
                self._taken[asker] = _BROKEN
                return asker, error
            finally:
                _forget_oldest(self._taken)
        return None

    def close(self, *, linger_ms: int = 0) -> None:
        """End all links; what was not sent in so many milliseconds is lost."""
        self.socket.close(linger_ms)


def _forget_oldest(numbers: OrderedDict[bytes, int]) -> None:
    if len(numbers) > _MOST_ASKERS:
        numbers.popitem(last=False)


def _open(kind: int) -> zmq.Socket[bytes]:
    """Open a socket that never waits at its end, and whose messages have no limit in number."""
    socket = zmq.Socket(zmq.Context.instance(), kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.set(option, 0)
    socket.set(zmq.RECONNECT_IVL_MAX, _LONGEST_PAUSE_MS)  # a name that has no server now is looked up each time
    socket.set(zmq.IPV6, 1)
    return socket


def _receive(socket: zmq.Socket[bytes]) -> list[Frame] | None:
    try:
        return [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None


class Worker:
    """A daemon thread that turns until `close`. Its work is given to `start`, once. If that fails, the process ends, or
    requests would wait for ever."""

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
        self._thread = threading.Thread(target=self._run, args=(run,), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException:
            log.exception("the thread %s failed, so this process ends", self._name)
            os._exit(1)

    def close(self, wake: Callable[[], None]) -> None:
        """Let the thread end, and wait for it. wake: makes it look."""
        self._ending.set()
        wake()
        if self._thread is not None:
            self._thread.join()
