"""A client of live video: a session whose frames go over a WebSocket."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import time
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Self

from PIL import Image
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from vlmserve.commands.client.chat_client import ChatClient, ServerError, error_in, json_or_none

PICTURE = 1
_DEPTH = 2  # frames of a temporal patch
_HEAD = struct.Struct("<Bd")
_QUALITY = 92


def jpeg(picture: Image.Image) -> bytes:
    """Return a frame as a file for `LiveSession.show`."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def clock_text(seconds: float) -> str:
    """Return a time of a video as minutes and seconds."""
    return f"{int(seconds // 60)}:{seconds % 60:04.1f}"


class LiveSession:
    """A session of a server, for one event loop. A context manager, which opens it and deletes it.

    client: of the server. fields: of POST /v1/sessions. arrived: when it said that each temporal patch is in the
    conversation, by `time.perf_counter`.
    """

    def __init__(self, client: ChatClient, fields: Mapping[str, Any]) -> None:
        self._client, self._fields = client, fields
        self._path = ""
        self._socket: ClientConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._flushed: list[asyncio.Future[Mapping[str, Any]]] = []
        self._failure: ServerError | None = None
        self.arrived: list[float] = []

    async def __aenter__(self) -> Self:
        opened = await self._client.call("POST", "/v1/sessions", self._fields)
        self._path = f"/v1/sessions/{opened['id']}"
        url = self._client.url.replace("http", "ws", 1) + self._path + "/frames"
        try:
            self._socket = await connect(url, additional_headers=self._client.headers, compression=None, proxy=None)
        except (WebSocketException, OSError) as error:
            await self.__aexit__(type(error), error, None)
            raise ServerError(f"no live video at {self._client.url}: {error}") from None
        self._reading = asyncio.create_task(self._read(self._socket))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._socket is not None:
            await self._socket.close()
        try:
            await self._client.call("DELETE", self._path)
        except ServerError:  # it is gone, or the server is
            if error is None:
                raise

    async def show(self, at: float, file: bytes) -> None:
        """Send a frame: its time in seconds, and a picture file. Waits while the server has no room. Raises
        ServerError."""
        await self._send(_HEAD.pack(PICTURE, at) + file)

    async def flush(self) -> Mapping[str, Any]:
        """Wait until all whole temporal patches are in the conversation; return how far the server is. Raises
        ServerError."""
        waiter: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._flushed.append(waiter)
        await self._send('{"type": "flush"}')
        return await waiter

    async def append(self, content: str) -> Any:
        """Add text to the conversation. Raises ServerError."""
        return await self._client.call("POST", f"{self._path}/append", {"content": content})

    async def ask(self, content: str, **fields: Any) -> Any:
        """Return the chat completion that answers a question. Raises ServerError."""
        return await self._client.call("POST", f"{self._path}/ask", {"content": content, "keep": False, **fields})

    def stream(self, content: str, **fields: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a streamed answer. Raises ServerError."""
        body = {"content": content, "keep": False, "stream": True, **fields}
        return self._client.events(f"{self._path}/ask", body)

    def standing(self, content: str, every: float, **fields: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answers to a question that is asked every so many seconds. Raises ServerError."""
        return self._client.events(f"{self._path}/standing", {"content": content, "every": every, **fields})

    async def _send(self, message: bytes | str) -> None:
        assert self._socket is not None
        try:
            await self._socket.send(message)
        except WebSocketException:
            await asyncio.sleep(0)  # what the server said last
            raise self._failure or ServerError("the server has closed the stream of frames") from None

    async def _read(self, socket: ClientConnection) -> None:
        try:
            async for text in socket:
                said = json_or_none(text.encode() if isinstance(text, str) else text) or {}
                if said.get("type") == "error":
                    self._failure = ServerError(error_in(said).get("message") or json.dumps(said))
                elif said.get("type") in ("frames", "flushed"):
                    self.arrived += [time.perf_counter()] * (said["done"] // _DEPTH - len(self.arrived))
                if said.get("type") == "flushed":
                    self._flushed.pop(0).set_result(said)
        except WebSocketException:
            pass
        finally:
            for waiter in self._flushed:
                if not waiter.done():
                    waiter.set_exception(self._failure or ServerError("the server has closed the stream of frames"))
            self._flushed.clear()
