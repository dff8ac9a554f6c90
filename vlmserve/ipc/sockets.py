"""Typed messages over ZeroMQ: one-way ones (PUSH, PULL), and questions with answers (DEALER, ROUTER).

A PUSH socket never drops; at its high-water mark it blocks. The marks are off here (0), so a send never blocks either.
The limits on requests bound the messages in flight, and large arrays travel through shared memory.

In front of each message travels an envelope: the requests that it is about, and the blocks of `SharedArrays` that hold
its arrays. It is looked at only if the message cannot be read: the receiver then frees the arrays and gets a
`RequestsLost` in the message's place, so that no client waits for ever.

A question's frames are its number, 8 bytes, and the message's. The answer repeats the number, so even a late answer
finds its question.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import zmq

from vlmserve.ipc.control_messages import ControlRefused, ControlRequest, ControlResult
from vlmserve.ipc.messages import RequestsLost, rids_of
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import Frame, WireCodec

logger = logging.getLogger(__name__)

_UNLIMITED = 0
_ZERO_COPY_FROM_BYTES = 16 * 1024
_LOST = "a message about this request was damaged on its way between the server's processes: try again"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message whose arrays have left this process. The thread that uses the senders sends or discards it, once.
    sender: chooses the one whose receiver is to get it."""

    sender: Callable[[], Sender]
    codec: WireCodec
    frames: list[Frame]

    def send(self) -> None:
        """Queue it for delivery."""
        self.sender().send_frames(self.frames)

    def discard(self) -> None:
        """Free its arrays: it will not be sent."""
        self.codec.discard(self.frames[1:])


class Sender:
    """The sending end of a channel. It never waits for its receiver. Only `prepare` is thread-safe: copying large
    arrays takes a while, so an event loop leaves it to a thread.

    address: an ``ipc://`` address; its receiver may come up later. types: the message types of the channel.
    linger_ms: how long `close` may keep trying to deliver.
    """

    def __init__(
        self,
        address: str,
        types: Iterable[type],
        *,
        shared: SharedArrays | None = None,
        linger_ms: int = 1000,
    ) -> None:
        types = tuple(types)
        self._codec = WireCodec(types, shared)
        self._preparing = threading.Lock()
        self._prepare_codec = WireCodec(types, shared)
        self._socket = zmq.Socket(zmq.Context.instance(), zmq.PUSH)
        self._socket.set(zmq.SNDHWM, _UNLIMITED)
        self._socket.set(zmq.LINGER, linger_ms)
        self._socket.copy_threshold = _ZERO_COPY_FROM_BYTES
        self._socket.connect(address)

    def send(self, message: object) -> None:
        """Queue a message for delivery. Arrays in it must not be changed afterwards. WireError for a foreign type."""
        self.send_frames(_encode(self._codec, message))

    def prepare(self, message: object, sender: Callable[[], Sender] | None = None) -> Prepared:
        """The first half of `send`, from any thread. sender: chooses another one of the same types and arrays when the
        message is sent."""
        with self._preparing:
            return Prepared(sender or (lambda: self), self._prepare_codec, _encode(self._prepare_codec, message))

    def send_frames(self, frames: Sequence[Frame]) -> None:
        """Queue an encoded message for delivery."""
        self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Deliver the queued messages, within `linger_ms`, and close."""
        self._socket.close()


def _encode(codec: WireCodec, message: object) -> list[Frame]:
    frames = codec.encode(message)
    return [json.dumps([rids_of(message), codec.blocks]).encode(), *frames]


class _Pull:
    """A socket that binds `address` and receives messages of some types."""

    def __init__(self, address: str, types: Iterable[type], shared: SharedArrays | None) -> None:
        self._codec = WireCodec(types, shared)
        self._shared = shared
        self._socket = zmq.Socket(zmq.Context.instance(), zmq.PULL)
        self._socket.set(zmq.RCVHWM, _UNLIMITED)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)

    def _next(self, flags: int) -> Any | None:
        """Return the next message. One that cannot be decoded is logged, and a `RequestsLost` comes in its place, or
        None if no request is known to be lost."""
        frames = self._socket.recv_multipart(flags=flags, copy=False)
        # Writable views of ZeroMQ's own buffers: arrays in a message map them without a copy.
        buffers: list[Frame] = [frame.buffer for frame in frames]
        try:
            return self._codec.decode(buffers[1:])
        except Exception as error:  # not only WireError: a bad message must not stop the process
            rids, blocks = _open_envelope(buffers[0])
            logger.error(
                "dropped a malformed message of %d frames, about %d requests: %s: %s",
                len(frames),
                len(rids),
                type(error).__name__,
                error,
            )
            for block in blocks:
                if self._shared is not None and self._shared.is_block_name(block):
                    self._shared.discard(block)
            return RequestsLost(rids=tuple(rids), message=_LOST) if rids else None


def _open_envelope(frame: Frame) -> tuple[list[str], list[str]]:
    """Return the rids and blocks of an envelope; none if it cannot be read."""
    try:
        rids, blocks = json.loads(bytes(frame))
        readable = all(isinstance(name, str) for name in [*rids, *blocks])
    except Exception:  # of too many kinds, for a frame may hold anything
        return [], []
    return (rids, blocks) if readable and isinstance(rids, list) and isinstance(blocks, list) else ([], [])


class Receiver(_Pull):
    """The receiving end of a channel, for a process with a loop of its own. Binds `address`."""

    def __init__(self, address: str, types: Iterable[type], *, shared: SharedArrays | None = None) -> None:
        super().__init__(address, types, shared)

    def recv(self, timeout_s: float | None = None, wake: Sequence[Any] = ()) -> Any:
        """Return the next message. None if none came in time (a timeout of None waits for ever), or if a file
        descriptor or another ZeroMQ socket of `wake` became readable. A malformed message is a `RequestsLost`, or
        dropped."""
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        # ZeroMQ's own waiting is the cheapest if there is nothing else to wait for.
        flags = zmq.NOBLOCK if wake or timeout_ms is not None else 0
        while not flags or self._is_next(timeout_ms, wake):
            message = self._next(flags)
            if message is not None:
                return message
        return None

    def _is_next(self, timeout_ms: int | None, wake: Sequence[Any]) -> bool:
        if not wake:
            return bool(self._socket.poll(timeout_ms))
        poller = zmq.Poller()
        for source in (self._socket, *wake):
            poller.register(source, zmq.POLLIN)
        return self._socket in dict(poller.poll(timeout_ms))

    def drain(self, timeout_s: float | None = 0.0, wake: Sequence[Any] = ()) -> list[Any]:
        """Return all messages that are waiting; if there are none, wait for the first as `recv` does."""
        messages = []
        message = self.recv(timeout_s, wake)
        while message is not None:
            messages.append(message)
            message = self.recv(0.0)
        return messages

    def close(self) -> None:
        """Stop receiving; messages not yet received are lost."""
        self._socket.close()


class AsyncReceiver(_Pull):
    """The receiving end of a channel, for an event loop. Binds `address`; make it inside the running loop.

    handle: is called, in the loop, with each message as it comes; a malformed one is a `RequestsLost`, or dropped. It
    must not raise. broken: is told what went wrong, once, if nothing can be received any more.

    The loop watches ZeroMQ's file descriptor. It becomes readable when something may have come, not once a message, so
    messages are taken until there is none. A step of many requests is one turn of the loop. After `turn_s` of them
    something else gets a turn.
    """

    def __init__(
        self,
        address: str,
        types: Iterable[type],
        handle: Callable[[Any], None],
        *,
        broken: Callable[[Exception], None],
        shared: SharedArrays | None = None,
        turn_s: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(address, types, shared)
        self._handle = handle
        self._broken = broken
        self._turn_s = turn_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._take)
        # A message from before the descriptor was watched may not show there.
        self._next_turn = self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._next_turn.cancel()
        until = self._clock() + self._turn_s
        try:
            while not self._socket.closed:
                message = self._next(zmq.NOBLOCK)
                if message is not None:
                    self._handle(message)
                if self._clock() >= until:
                    self._next_turn = self._loop.call_soon(self._take)
                    return
        except zmq.Again:
            pass
        except Exception as error:
            self.close()
            self._broken(error)

    def close(self) -> None:
        """Stop receiving; messages not yet received are lost."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()


class ControlServer:
    """The answering end. Binds `address`. socket: for waiting on several sources at once (see `Receiver.drain`)."""

    def __init__(self, address: str) -> None:
        self._questions, self._answers = WireCodec(get_args(ControlRequest)), WireCodec(get_args(ControlResult))
        self.socket = zmq.Socket(zmq.Context.instance(), zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(address)

    def answer_all(self, handle: Callable[[ControlRequest], ControlResult]) -> None:
        """Answer all questions that have come; returns at once if there are none. handle: must not raise."""
        while self.socket.poll(0):
            asker, number, *frames = self.socket.recv_multipart()
            try:
                question = self._questions.decode(frames)
            except Exception as error:  # a bad message must not stop the process
                logger.error("dropped a malformed control message: %s: %s", type(error).__name__, error)
                answer: ControlResult = ControlRefused(message="the control message was malformed", status=500)
            else:
                answer = handle(question)
            self.socket.send_multipart([asker, number, *self._answers.encode(answer)])

    def close(self) -> None:
        """Stop answering."""
        self.socket.close()


class ControlClient:
    """The asking end; make it inside the running loop."""

    def __init__(self, address: str) -> None:
        self._questions, self._answers = WireCodec(get_args(ControlRequest)), WireCodec(get_args(ControlResult))
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._socket = zmq.Socket(zmq.Context.instance(), zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)  # however long an engine does not answer
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._fd = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._take)

    async def ask(self, question: ControlRequest) -> ControlResult:
        """Ask and wait for the answer, however long it takes: bound the wait with `asyncio.timeout`."""
        number = next(self._numbers).to_bytes(8, "big")
        future = self._waiting[number] = self._loop.create_future()
        try:
            self._socket.send_multipart([number, *self._questions.encode(question)], flags=zmq.NOBLOCK)
            self._loop.call_soon(self._take)  # sending may have used up the sign that something has come
            return await future
        finally:
            del self._waiting[number]

    def _take(self) -> None:
        while not self._socket.closed and self._socket.poll(0):
            number, *frames = self._socket.recv_multipart()
            future = self._waiting.get(number)
            if future is None or future.done():  # its asker has given up
                continue
            try:
                future.set_result(self._answers.decode(frames))
            except Exception as error:
                future.set_exception(error)

    def close(self) -> None:
        """Stop asking; answers not yet there never come."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()
