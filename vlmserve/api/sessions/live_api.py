"""Live video of sessions: frames over a WebSocket, and questions that are asked every so often."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request, WebSocket
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocketDisconnect

from processors.fetch.sources import call_off
from processors.processed import ProcessedVideo, nbytes_of
from vlmserve.api.body import BodyBudget, read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.errors import Error, describe, not_found
from vlmserve.api.openapi import BODY_ERRORS, ID_ERRORS, MODEL_ERRORS, operation
from vlmserve.api.request_id import name_answer, new_id
from vlmserve.api.served_model import DONE, EventStream, ServedModel
from vlmserve.api.sessions.api import SessionsApi
from vlmserve.api.sessions.held import HeldSession, HeldSessions
from vlmserve.api.sessions.live import LiveVideo, parse_frame
from vlmserve.api.sessions.protocol import (
    AskRequest,
    LiveOptions,
    PullRequest,
    SessionObject,
    StandingAnswer,
    StandingRequest,
)
from vlmserve.api.sessions.pulling import Puller, check_address
from vlmserve.frontend.live import Units
from vlmserve.frontend.openai.json_bodies import invalid_value, json_object, json_text, sse_event
from vlmserve.frontend.requests import Caller
from vlmserve_common.errors import BadRequestError

FRAMES_PATH = "/v1/sessions/{session_id}/frames"
_INLINE_BYTES = 256 * 1024  # larger raw frames are made pictures in a thread
_MOST_TEXT = 1024
_RETRY_S = 0.25
_MOST_TRIES = 120
# why a WebSocket is closed, by the status of its error
_CODES = {429: 1013, 503: 1013}
_T = TypeVar("_T")


class LiveApi:
    """The endpoints of live video."""

    def __init__(self, served: ServedModel, sessions: HeldSessions, api: SessionsApi, budget: BodyBudget) -> None:
        self._served = served
        self._sessions = sessions
        self._api = api
        self._budget = budget
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._opening = 0

    async def frames(self, socket: WebSocket) -> None:
        """Take frames of a session until the client ends, or a message is bad. See docs/live.md for the messages."""
        caller, session_id = caller_of(socket), socket.path_params["session_id"]
        try:
            session = self._sessions.find(caller.owner, session_id)
            live = self._live_of(session)
            live.begin()
        except BadRequestError as refused:
            status, body = describe(refused)
            await socket.send_denial_response(JSONResponse(body, status))
            return
        with suppress(WebSocketDisconnect, OSError), self._sessions.used(caller.owner, session_id):
            try:
                await socket.accept()
                reading = asyncio.create_task(self._read(socket, session, live))
                telling = asyncio.create_task(_tell(socket, live))
                error = await self._serve(session, live, caller, reading, telling)
            finally:  # before the client is told: the next connection may come then
                live.stop()
            if error is not None:
                status, body = describe(error)
                await _send(socket, {"type": "error", **body})
                await socket.close(_CODES.get(status, 1008 if status < 500 else 1011), body["error"]["code"])

    def _live_of(self, session: HeldSession) -> LiveVideo:
        if session.live is None:
            session.live = LiveVideo(self._api.live_rules(session.about.live or LiveOptions()), self._budget)
        return session.live

    async def _serve(
        self,
        session: HeldSession,
        live: LiveVideo,
        caller: Caller,
        reading: asyncio.Task[None],
        *others: asyncio.Task[None],
    ) -> Exception | None:
        """Let frames join the conversation until `reading` has ended, and they all have. Returns why that has failed.
        All tasks are ended."""
        working = asyncio.create_task(self._work(session, live, caller))
        gone = asyncio.create_task(session.gone.wait())
        try:
            await asyncio.wait((working, reading, gone), return_when=asyncio.FIRST_COMPLETED)
            live.end()
            if reading.done():  # what came before the end still joins
                await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            failed = [task.exception() for task in (working, reading) if task.done()]
            if gone.done():
                return not_found("session", session.id)
            return next((error for error in failed if isinstance(error, Exception)), None)
        finally:
            await call_off((working, reading, gone, *others))

    async def _read(self, socket: WebSocket, session: HeldSession, live: LiveVideo) -> None:
        while True:
            await live.room()
            try:
                async with asyncio.timeout(session.ttl):
                    message = await socket.receive()
            except TimeoutError:
                raise BadRequestError(
                    f"no frame came for {session.ttl:g} s, the session's ttl", code="frames_timeout", status=408
                ) from None
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes")
            if data is None:
                await self._obey(socket, live, message["text"])
            elif len(data) <= _INLINE_BYTES:
                live.take(*parse_frame(data))
            else:
                live.take(*await self._served.threads.run(parse_frame, data))

    @operation(
        *("POST", "/v1/sessions/{session_id}/pull", "pullSessionFrames", "Sessions"),
        request=PullRequest,
        example={"url": "rtsp://camera.example.com/stream"},
        answer=SessionObject,
        errors=(*BODY_ERRORS, *ID_ERRORS, 403, 409, 429),
    )
    async def pull(self, request: Request, session_id: str) -> Response:
        """Let the server open live video and take its frames, until the session ends."""
        body = await read_body(request, PullRequest, self._served.settings)
        caller = caller_of(request)
        session = self._sessions.find(caller.owner, session_id)
        check_address(body.url, self._served.settings)
        most = self._served.settings.max_live_pulls
        if (there := len(self._pulls) + self._opening) >= most:
            raise BadRequestError(
                f"{there} streams are pulled, the limit is {most} (setting --max-live-pulls); try again later",
                code="too_many_streams",
                status=429,
            )
        live = self._live_of(session)
        live.begin()
        puller = Puller(body.url, live.rules.fps, self._served.settings)
        self._opening += 1
        try:
            await puller.opened()
        except BaseException:
            puller.close()
            live.stop()
            raise
        finally:
            self._opening -= 1
        live.pulled = {"pulled": True}  # type: ignore[typeddict-item]
        self._pulls[session_id] = asyncio.create_task(self._pull(session, live, replace(caller, ended=None), puller))
        return JSONResponse(session.describe())

    @operation(
        *("DELETE", "/v1/sessions/{session_id}/pull", "stopSessionPull", "Sessions"),
        answer=SessionObject,
        errors=ID_ERRORS,
    )
    async def stop_pull(self, request: Request, session_id: str) -> Response:
        """Close the live video that the server pulls for a session."""
        session = self._sessions.find(caller_of(request).owner, session_id)
        task = self._pulls.get(session_id)
        if task is None:
            raise not_found("pull", session_id)
        task.cancel()
        await asyncio.wait((task,))
        return JSONResponse(session.describe())

    async def _pull(self, session: HeldSession, live: LiveVideo, caller: Caller, puller: Puller) -> None:
        async def read() -> None:
            async with aclosing(puller.messages()) as messages:
                async for message in messages:
                    await live.room()
                    live.take(*await self._served.threads.run(parse_frame, message))

        error: Exception | None = None
        try:
            error = await self._serve(session, live, caller, asyncio.create_task(read()))
        finally:
            puller.close()
            live.stop()
            told = {} if error is None else {"error": describe(error)[1]["error"]["message"]}
            live.pulled = {"pulled": False, **told}  # type: ignore[typeddict-item]
            del self._pulls[session.id]

    async def close(self) -> None:
        """End all streams that are pulled."""
        await call_off(list(self._pulls.values()))

    async def _obey(self, socket: WebSocket, live: LiveVideo, text: str) -> None:
        if len(text) > _MOST_TEXT:
            raise invalid_value("type", f"a message of text has {len(text)} characters, the limit is {_MOST_TEXT}")
        order = json_object(text.encode(), "message")
        if order != {"type": "flush"}:
            raise invalid_value("type", 'a message of text must be {"type": "flush"}; frames come in binary messages')
        await live.seen().settled()
        await _send(socket, {"type": "flushed", **live.state})

    async def _work(self, session: HeldSession, live: LiveVideo, caller: Caller) -> None:
        own, numbers = new_id("frames"), itertools.count()

        async def load(files: Sequence[bytes | Units]) -> ProcessedVideo:
            name = f"{own}-{next(numbers)}"
            video = await _patiently(lambda: self._api.load_frames(session, files, name, caller))
            self._sessions.check_memory(nbytes_of(video))
            return video

        async def join() -> None:
            async with self._sessions.changed(caller.owner, session.id, limited=False):
                patches, dialogue = live.take_loaded(), session.dialogue
                for patch in patches:
                    dialogue = live.rules.shown(dialogue, patch)
                dialogue, slid = live.rules.windowed(dialogue, session.about.cache_salt)
                self._sessions.reserve(session, dialogue)
                name = f"{own}-{next(numbers)}"
                usage = await _patiently(lambda: self._api.compute(session, dialogue, name, caller, slid))
                live.have_joined(len(patches), usage["prompt_tokens"])

        await live.run(load, join)

    @operation(
        *("POST", "/v1/sessions/{session_id}/standing", "askSessionAgainAndAgain", "Sessions"),
        request=StandingRequest,
        example={"content": "Is there a person?", "every": 5, "max_tokens": 16},
        answer="text/event-stream",
        events=StandingAnswer | Error,
        ends_with_done=True,
        errors=MODEL_ERRORS,
    )
    async def standing(self, request: Request, session_id: str) -> Response:
        """Ask a question every so often, when frames have come since. Each answer is an event."""
        body = await read_body(request, StandingRequest, self._served.settings)
        self._served.check_name(body.model)
        for name in ("keep", "stream"):
            if getattr(body, name):
                raise invalid_value(name, f"{name} is true; answers to a standing question are whole, and not kept")
        own_id, caller = name_answer(request, "standing", body.rid), caller_of(request)
        self._sessions.find(caller.owner, session_id)
        return EventStream(b": asked\n\n", self._answers(session_id, body, own_id, caller))

    async def _answers(
        self, session_id: str, body: StandingRequest, own_id: str, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        fields = {name: getattr(body, name) for name in AskRequest.model_fields}
        asked = AskRequest.model_construct(**{**fields, "keep": False, "stream": None, "rid": None})
        loop, number, before = asyncio.get_running_loop(), 0, None
        try:
            with self._sessions.used(caller.owner, session_id) as session:
                last = loop.time()
                while loop.time() - last <= session.ttl:
                    began, live = loop.time(), session.live
                    now = (session.dialogue.messages, 0 if live is None else live.used)
                    if now != before and any(now):
                        name, time = f"{own_id}-{number}", None if live is None else live.now
                        answer = await _unless_busy(self._api.whole(session_id, asked, name, caller))
                        if answer is not None:
                            before, last, number = now, began, number + 1
                            yield sse_event(
                                {"object": "session.answer", "number": number, "time": time, "answer": answer}
                            )
                            if number == body.max_answers:
                                break
                    else:
                        yield b": waiting\n\n"
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(began + body.every):
                            await session.gone.wait()
                    self._sessions.check_there(session)
        except Exception as error:
            yield sse_event(describe(error)[1])
        yield DONE


async def _unless_busy(call: Awaitable[_T]) -> _T | None:
    """Return None if the server is busy (429)."""
    try:
        return await call
    except BadRequestError as error:
        if error.status != 429:
            raise
        return None


async def _patiently(call: Callable[[], Awaitable[_T]]) -> _T:
    """Try until the server is not busy; other clients come first meanwhile. Raises what the last try raises."""
    for number in itertools.count(1):
        try:
            return await call()
        except BadRequestError as error:
            if error.status != 429 or error.code == "sessions_full" or number == _MOST_TRIES:
                raise
        await asyncio.sleep(_RETRY_S)
    raise AssertionError


async def _tell(socket: WebSocket, live: LiveVideo) -> None:
    """Tell the client how many frames are in the conversation, whenever there are more."""
    told = live.done
    with suppress(WebSocketDisconnect, OSError):
        while True:
            await live.until_more(told)
            told = live.done
            await _send(socket, {"type": "frames", **live.state})


async def _send(socket: WebSocket, message: dict[str, Any]) -> None:
    await socket.send_text(json_text(message).decode())
