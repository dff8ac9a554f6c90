"""Questions and answers over ZeroMQ: an event loop asks (DEALER), a process with a loop of its own answers (ROUTER).

Frames: the question's number, 8 bytes, and the message's. The answer repeats the number, so even a late
answer finds its question.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any, get_args

import zmq

from vlmserve.ipc.control_messages import ControlRefused, ControlRequest, ControlResult
from vlmserve_common.transport.wire import WireCodec

logger = logging.getLogger(__name__)


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
