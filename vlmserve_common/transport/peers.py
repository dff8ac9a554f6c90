"""Connections between servers: typed messages over TCP, to and from peers that know the same secret.

A connection begins with a handshake: each side proves with an HMAC over two nonces that it knows the key, which never
travels. Both sides state the version of their protocol in it. Then each side sends messages in the frames of
`transport.wire`. A message is

    number of frames (u32) | length of each (u64) | tag (16 bytes) | the frames | tag (16 bytes)

A tag is keyed BLAKE3 over the connection's key, the direction, the number of the message, and the bytes before it. So
lost, doubled, exchanged, forged and damaged messages are noticed, and lengths are believed only if they are genuine.
Nothing is encrypted: these connections are for private networks. Whatever is wrong ends one connection, no other.

The event loop reads into memory of the message's size and writes from the sender's arrays, without copies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import numpy as np

from vlmserve_common.errors import VlmserveError
from vlmserve_common.transport.wire import Frame, WireCodec, WireError

HANDSHAKE_S = 5.0
"""The seconds that connecting and the handshake may take, each."""
_SMALL_BYTES = 2**12  # a message of the handshake
_MOST_FRAMES = 16
_COUNT, _LENGTH, _TAG_BYTES = struct.Struct("<I"), struct.Struct("<Q"), 16
_COPIED_BYTES = 2**16  # frames up to this size leave with their head
_NONCE_BYTES = 32
_OTHER_KEY = "the two servers have different keys (setting --peer-key)"


class PeerError(VlmserveError):
    """The other side of a connection broke the protocol, refused, was refused, or is silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """The first message, of the side that was called."""

    protocol: int
    nonce: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """The caller's answer. proof: an HMAC over both nonces."""

    protocol: int
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The proof of the side that was called. refusal: why there is none."""

    proof: bytes = b""
    refusal: str = ""


_HANDSHAKE = (Challenge, Response, Accepted)


class PeerConnection:
    """One end of a connection. One task may send while another receives. Made by `call` and `answer`.

    heard: when the last bytes came, by `clock`, in seconds. sent_bytes, received_bytes: in all.
    """

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.heard = clock()
        self.sent_bytes = self.received_bytes = 0
        self._speak(bytes(32), bytes(32), _HANDSHAKE, _HANDSHAKE)

    def _speak(self, out: bytes, into: bytes, send_types: Iterable[type], receive_types: Iterable[type]) -> None:
        self._encoder, self._decoder = WireCodec(send_types), WireCodec(receive_types)
        self._keys, self._sent, self._received = (out, into), 0, 0

    async def send(self, message: object) -> None:
        """Send a message; wait while the other side does not read. OSError if the connection is gone."""
        frames = [memoryview(frame) for frame in self._encoder.encode(message)]
        head = _COUNT.pack(len(frames)) + b"".join(_LENGTH.pack(frame.nbytes) for frame in frames)
        key, self._sent = self._keys[0], self._sent + 1
        parts: list[Frame] = [head, _tag(key, self._sent, b"head", [head]), *frames]
        parts.append(_tag(key, self._sent, b"body", frames))
        joined = bytearray()
        for part in parts:
            if len(part) <= _COPIED_BYTES:
                joined += part
            else:
                await self._write(joined)
                await self._write(part)
                joined = bytearray()
        await self._write(joined)

    async def receive(self, most_bytes: int) -> Any:
        """Return the next message. PeerError if it is damaged or has more than so many bytes; OSError if the connection
        has ended."""
        key, self._received = self._keys[1], self._received + 1
        count = await self._read(_COUNT.size)
        (frames,) = _COUNT.unpack(count)
        if frames > _MOST_FRAMES:
            raise PeerError(f"a message claims {frames} frames; {_MOST_FRAMES} are possible")
        lengths = await self._read(frames * _LENGTH.size)
        tag = await self._read(_TAG_BYTES)
        if not hmac.compare_digest(tag, _tag(key, self._received, b"head", [count, lengths])):
            raise PeerError("a message is damaged")
        sizes = [_LENGTH.unpack_from(lengths, place)[0] for place in range(0, len(lengths), _LENGTH.size)]
        if sum(sizes) > most_bytes:
            raise PeerError(f"a message has {sum(sizes)} bytes; the limit is {most_bytes}")
        body = [await self._read(size) for size in sizes]
        tag = await self._read(_TAG_BYTES)
        if not hmac.compare_digest(tag, _tag(key, self._received, b"body", body)):
            raise PeerError("a message is damaged")
        try:
            return self._decoder.decode(body)
        except WireError as error:
            raise PeerError(str(error)) from error

    def close(self) -> None:
        """End the connection. Can be called again."""
        self._sock.close()

    async def _write(self, part: Frame) -> None:
        if len(part):
            await self._loop.sock_sendall(self._sock, part)
            self.sent_bytes += len(part)

    async def _read(self, size: int) -> memoryview:
        view, done = np.empty(size, np.uint8).data, 0  # not a bytearray, which is filled with zeros first
        while done < size:
            count = await self._loop.sock_recv_into(self._sock, view[done:])
            if not count:
                raise ConnectionError("the other side has closed the connection")
            done += count
            self.received_bytes += count
            self.heard = self._clock()
        return view

    async def _prove(self, protocol: int, key: str | None, types: Sequence[type], back: Sequence[type]) -> None:
        """Do the caller's part of the handshake."""
        challenge = await self._expect(Challenge)
        _check_version(challenge.protocol, protocol)
        nonces = challenge.nonce, secrets.token_bytes(_NONCE_BYTES)
        await self.send(Response(protocol=protocol, nonce=nonces[1], proof=_proof(key, b"caller", *nonces)))
        accepted = await self._expect(Accepted)
        if accepted.refusal:
            raise PeerError(accepted.refusal)
        if not hmac.compare_digest(accepted.proof, _proof(key, b"called", *nonces)):
            raise PeerError(_OTHER_KEY)
        self._speak(_proof(key, b"there", *nonces), _proof(key, b"back", *nonces), types, back)

    async def _check(self, protocol: int, key: str | None, types: Sequence[type], back: Sequence[type]) -> None:
        """Do the called side's part of the handshake."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        await self.send(Challenge(protocol=protocol, nonce=nonce))
        response = await self._expect(Response)
        nonces = nonce, response.nonce
        try:
            _check_version(response.protocol, protocol)
            if not hmac.compare_digest(response.proof, _proof(key, b"caller", *nonces)):
                raise PeerError(_OTHER_KEY)
        except PeerError as error:
            await self.send(Accepted(refusal=str(error)))
            raise
        await self.send(Accepted(proof=_proof(key, b"called", *nonces)))
        self._speak(_proof(key, b"back", *nonces), _proof(key, b"there", *nonces), types, back)

    async def _expect(self, kind: type) -> Any:
        message = await self.receive(_SMALL_BYTES)
        if not isinstance(message, kind):
            raise PeerError(f"{type(message).__name__} came in place of {kind.__name__}")
        return message


async def call(
    host: str, port: int, *, protocol: int, key: str | None, send_types: Sequence[type], receive_types: Sequence[type]
) -> PeerConnection:
    """Connect to a peer and do the handshake. key: the shared secret; None if there is none.

    Raises OSError, TimeoutError, and PeerError for a peer of another version or another key.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for place, (family, kind, proto, _, address) in enumerate(found, 1):
            sock = socket.socket(family, kind, proto)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                break
            except BaseException as error:
                sock.close()
                if place == len(found) or not isinstance(error, OSError):
                    raise
    connection = PeerConnection(sock)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await connection._prove(protocol, key, send_types, receive_types)
    except BaseException:
        connection.close()
        raise
    return connection


async def answer(
    sock: socket.socket, *, protocol: int, key: str | None, send_types: Sequence[type], receive_types: Sequence[type]
) -> PeerConnection:
    """Do the handshake with a caller whose connection was accepted; errors as in `call`. The socket is closed then."""
    connection = PeerConnection(sock)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await connection._check(protocol, key, send_types, receive_types)
    except BaseException:
        connection.close()
        raise
    return connection


async def until_one_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines side by side until one of them ends, cancel the others, and raise its error.

    Unlike an `asyncio.TaskGroup` of Python 3.11, this does not forget that it was cancelled while one of them failed.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _tag(key: bytes, number: int, part: bytes, content: Iterable[Frame]) -> bytes:
    hasher = blake3.blake3(key=key)
    hasher.update(part + _LENGTH.pack(number))
    for piece in content:
        hasher.update(piece)
    return hasher.digest(length=_TAG_BYTES)


def _proof(key: str | None, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest((key or "").encode(), side + b"".join(nonces), hashlib.sha256)


def _check_version(theirs: int, ours: int) -> None:
    if theirs != ours:
        raise PeerError(f"the protocol's version is {theirs} there and {ours} here")
