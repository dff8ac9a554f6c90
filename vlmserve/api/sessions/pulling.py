"""Streams of cameras that the server opens itself, each in its own process, from hosts that its operator allows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future, wait
from urllib.parse import urlsplit

from processors.fetch.limits import within
from processors.pool import prepare_processes
from processors.video.pulling import END, SCHEMES, run_puller
from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError, EngineError, SettingsError
from vlmserve_common.process.child import ChildProcess
from vlmserve_common.process.stop_signals import stop_signals_held


def check_address(url: str, settings: ServerSettings) -> None:
    """Raise BadRequestError (403) unless the operator allows the host of an address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        host, parts = "", urlsplit("")
    if parts.scheme.lower() not in SCHEMES or not host:
        schemes = ", ".join(sorted(f"{scheme}://" for scheme in SCHEMES))
        raise BadRequestError(
            f"url is {url[:80]!r}; it must begin with one of {schemes}, and name a host",
            param="url",
            code="invalid_media_url",
        )
    if not any(within(host, one) for one in (settings.allowed_live_hosts or "").split(",")):
        raise BadRequestError(
            f"live video of the host {host!r} is not allowed here (setting --allowed-live-hosts)",
            param="url",
            code="host_not_allowed",
            status=403,
        )


class Puller:
    """The process that opens one address. Make it in an event loop, and close it.

    fps: at most so many frames a second are sent.
    """

    def __init__(self, url: str, fps: float, settings: ServerSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._opened: Future[None] = Future()
        self._child: ChildProcess | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._args = url, fps, settings.max_video_frame_pixels
        self._log_level = settings.log_level
        prepare_processes()
        self._thread = threading.Thread(target=self._run, name="live-pull", daemon=True)
        self._thread.start()

    async def opened(self) -> None:
        """Wait until the address is open. Raises BadRequestError."""
        await asyncio.wrap_future(self._opened)

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield frames, as messages of a WebSocket. Raises BadRequestError when the stream ends."""
        while True:
            message = await self._messages.get()
            if message.startswith(END):
                why = message.removeprefix(END).decode(errors="replace")
                raise BadRequestError(f"the stream has stopped: {why}", code="stream_ended")
            yield message

    def close(self) -> None:
        """End the process, from any thread. May be called again."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.hang_up()
                self._child.kill()

    def _run(self) -> None:
        title = "the process that pulls live video"
        try:
            with stop_signals_held():
                child = ChildProcess(
                    "live-pull", run_puller, self._args, title=title, log_level=self._log_level, forked=True
                )
        except Exception as error:
            self._opened.set_exception(EngineError(f"{title} cannot start: {error}"))
            return
        try:
            with self._lock:
                self._child = child
                if self._closed:
                    return
            child.take_report()
            self._opened.set_result(None)
            while not self._closed:
                self._put(child.pipe.recv_bytes())
        except (EngineError, SettingsError) as error:
            self._opened.set_exception(
                BadRequestError(f"the url cannot be opened: {error}", param="url", code="invalid_media_url")
            )
        except (EOFError, OSError):
            if not self._closed:
                self._put(END + child.how_it_died().encode())
        finally:
            if not self._opened.done():
                self._opened.cancel()
            with self._lock:
                self._child = None
            child.kill()
            child.stop()

    def _put(self, message: bytes) -> None:
        """Hand a message over, and wait until there is room for it."""
        put = asyncio.run_coroutine_threadsafe(self._messages.put(message), self._loop)
        while not self._closed and not put.done():
            wait([put], timeout=0.5)
        put.cancel()
