"""The page's camera: what a webcam shows goes into a session of live video, and a question is asked again and again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from PIL import Image

from vlmserve.commands.client.chat_client import ChatClient, ServerError
from vlmserve.commands.client.live import LiveSession, clock_text, jpeg

_FPS, _KEEP_S = 1.0, 60.0
_SHOWN = 8  # answers
_MOST_TOKENS = 64
_LATE_S = 5.0  # in which frames of a page that was closed may still come


class Watch:
    """One viewer's camera, for one event loop. client, model: who answers. clock: in seconds."""

    def __init__(self, client: ChatClient, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._fields = {"model": model, "live": {"fps": _FPS, "keep_seconds": _KEEP_S}}
        self._client, self._clock = client, clock
        self._session: LiveSession | None = None
        self._began = self._sent = self._asked = self._left = -1e9
        self._asking: asyncio.Task[None] | None = None
        self._said: deque[str] = deque(maxlen=_SHOWN)

    async def show(self, picture: np.ndarray, question: str, every: float) -> str:
        """Take a frame, uint8 [height, width, 3], and ask when it is time. Returns the last answers, the newest one
        first."""
        now = self._clock()
        if now - self._left < _LATE_S:
            return ""
        try:
            if self._session is None:
                self._session, self._began = await LiveSession(self._client, self._fields).__aenter__(), now
                if self._left >= now:  # the viewer has left while it was opened
                    await self.close()
                    return ""
            session = self._session
            if (now - self._sent) * _FPS >= 1:
                self._sent = now
                await session.show(now - self._began, await asyncio.to_thread(_file, picture))
            if question.strip() and now - self._asked >= every and (self._asking is None or self._asking.done()):
                self._asked = now
                self._asking = asyncio.create_task(self._ask(session, question, now - self._began))
        except ServerError as error:
            await self._fail(error)
        return "\n".join(reversed(self._said))

    async def _ask(self, session: LiveSession, question: str, at: float) -> None:
        try:
            answer = await session.ask(question, max_tokens=_MOST_TOKENS, temperature=0)
            self._say(at, answer["choices"][0]["message"]["content"])
        except ServerError as error:
            await self._fail(error)

    async def _fail(self, error: ServerError) -> None:
        self._say(self._clock() - self._began, str(error))
        await self.close()

    def _say(self, at: float, text: str) -> None:
        self._said.append(f"{clock_text(at)}  {text.strip()}")

    async def leave(self) -> None:
        """End the session: the viewer has left. Frames that are still on their way open no other one. But a page whose
        connection only broke may go on."""
        self._left = self._clock()
        if self._asking is not None:
            self._asking.cancel()
        await self.close()

    async def close(self) -> None:
        """End the session, if there is one. The next frame opens another one."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(ServerError):  # it may be gone already
                await session.__aexit__(None, None, None)


def _file(picture: np.ndarray) -> bytes:
    return jpeg(Image.fromarray(picture).convert("RGB"))
