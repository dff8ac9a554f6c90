"""The sessions that the server holds: their conversations in memory, limits, and when they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from vlmserve.api.errors import not_found
from vlmserve.api.request_id import new_id
from vlmserve.api.sessions.live import LiveVideo, Seen
from vlmserve.api.sessions.protocol import SessionObject, SessionRequest
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.dialogue import Dialogue
from vlmserve_common.errors import BadRequestError

_MOST_WAITING = 64
"""Changes of one session that wait for their turn."""


@dataclass(kw_only=True, eq=False)
class HeldSession:
    """A conversation that is open. about: as its client opened it. ttl: seconds that it is kept after its last use.
    used: when that was, by the monotonic clock. users: requests that work with it. waiting: changes that wait for
    `turn`. gone: set once it was deleted, or has expired. reserved: bytes of media for which there is no message yet.
    live: its live video, once frames have come."""

    id: str
    owner: str
    model: str
    about: SessionRequest
    ttl: float
    dialogue: Dialogue = field(default_factory=Dialogue)
    tokens: int = 0
    reserved: int = 0
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    users: int = 0
    waiting: int = 0
    live: LiveVideo | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def describe(self) -> SessionObject:
        """Return it as clients see it."""
        live = {} if self.live is None else {"live": self.live.state}
        now, idle = time.time(), 0.0 if self.users else time.monotonic() - self.used
        return SessionObject(
            id=self.id,
            object="session",
            model=self.model,
            created=int(self.created),
            expires=int(now + self.ttl - idle),
            age_s=now - self.created,
            idle_s=idle,
            ttl=self.ttl,
            messages=len(self.dialogue.messages),
            media=self.dialogue.num_media,
            tokens=self.tokens,
            bytes=self.dialogue.nbytes,
            **live,  # type: ignore[typeddict-item]
        )


class HeldSessions:
    """All sessions, in one event loop. A session belongs to the API key that opened it."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._held: dict[str, HeldSession] = {}

    def open(self, owner: str, about: SessionRequest, model: str) -> HeldSession:
        """Open a session. Raises BadRequestError for a ttl above the limit, and if there are too many (429)."""
        settings = self._settings
        ttl = settings.open_session_timeout_s if about.ttl is None else about.ttl
        if ttl > settings.open_session_timeout_s:
            raise BadRequestError(
                f"ttl is {ttl:g}; it must be at most {settings.open_session_timeout_s:g} seconds (setting "
                "--open-session-timeout-s)",
                param="ttl",
                code="invalid_value",
            )
        own = len(self.of(owner)) if owner else 0  # without keys everybody is one owner
        for count, whose, limit, name in (
            (own, "of this API key", settings.max_open_sessions_per_key, "--max-open-sessions-per-key"),
            (len(self._held), "", settings.max_open_sessions, "--max-open-sessions"),
        ):
            if count >= limit:
                raise BadRequestError(
                    f"{count} sessions {whose and whose + ' '}are open, the limit is {limit} (setting {name}); delete "
                    "one, or try again later",
                    code="too_many_sessions",
                    status=429,
                )
        session = HeldSession(id=new_id("session"), owner=owner, model=model, about=about, ttl=ttl)
        self._held[session.id] = session
        self._wait(session)
        return session

    @property
    def count(self) -> int:
        """Return the number of open sessions."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Return the memory of all sessions, in bytes, with what is being appended."""
        return sum(
            session.dialogue.nbytes + session.reserved + (0 if session.live is None else session.live.nbytes)
            for session in self._held.values()
        )

    def of(self, owner: str) -> list[HeldSession]:
        """Return an owner's sessions, the oldest first."""
        return [session for session in self._held.values() if session.owner == owner]

    def find(self, owner: str, session_id: str) -> HeldSession:
        """Return a session. Raises BadRequestError (404) for an unknown session and another owner's alike."""
        session = self._held.get(session_id)
        if session is None or session.owner != owner:
            raise not_found("session", session_id)
        return session

    def delete(self, owner: str, session_id: str) -> None:
        """Forget a session. Answers under way go on; nothing more is added to it. Raises BadRequestError (404)."""
        self._forget(self.find(owner, session_id))

    @contextmanager
    def used(self, owner: str, session_id: str) -> Iterator[HeldSession]:
        """Use a session, which does not expire meanwhile. Raises BadRequestError (404)."""
        session = self.find(owner, session_id)
        session.users += 1
        if session.timer is not None:
            session.timer.cancel()
        try:
            yield session
        finally:
            session.users -= 1
            session.used = time.monotonic()
            if not session.users and not session.gone.is_set():
                self._wait(session)

    @asynccontextmanager
    async def changed(
        self, owner: str, session_id: str, seen: Seen | None = None, *, limited: bool = True
    ) -> AsyncIterator[HeldSession]:
        """Use a session to add to its conversation. Changes come one at a time, in the order of their requests. seen:
        frames that are in the conversation first. limited: refuse the change if too many wait.

        Raises BadRequestError for an unknown session, one that is deleted meanwhile (404), and too many changes that
        wait (429).
        """
        with self.used(owner, session_id) as session:
            if limited and session.waiting >= _MOST_WAITING:
                raise BadRequestError(
                    f"{session.waiting} changes of this session wait for their turn, the limit is {_MOST_WAITING}; "
                    "try again later",
                    code="session_busy",
                    status=429,
                )
            session.waiting += 1
            try:
                if seen is not None:
                    await seen.settled()
                await session.turn.acquire()
            finally:
                session.waiting -= 1
            try:
                self.check_there(session)
                yield session
            finally:
                session.reserved = 0
                session.turn.release()

    @asynccontextmanager
    async def asked(self, owner: str, session_id: str, seen: Seen | None, *, keep: bool) -> AsyncIterator[HeldSession]:
        """Use a session for a question. One that is not kept changes nothing, and does not wait for other requests.
        seen: frames that came before it."""
        if keep:
            async with self.changed(owner, session_id, seen) as session:
                if seen is not None:
                    seen.live.set_aside(seen.missing)
                try:
                    yield session
                finally:
                    if seen is not None:
                        seen.live.put_back()
        else:
            with self.used(owner, session_id) as session:
                if seen is not None:
                    await seen.settled()
                yield session

    def reserve(self, session: HeldSession, dialogue: Dialogue) -> None:
        """Take memory for a conversation that is to replace a session's. Raises BadRequestError (429) if there is
        none."""
        more = max(0, dialogue.nbytes - session.dialogue.nbytes)
        self.check_memory(more)
        session.reserved = more

    def check_memory(self, more: int) -> None:
        """Raise BadRequestError (429) unless so many bytes more may be held."""
        held, limit = self.nbytes, self._settings.max_open_session_bytes
        if held + more > limit:
            raise BadRequestError(
                f"all sessions hold {held} bytes and {more} more came, the limit is {limit} (setting "
                "--max-open-session-bytes); delete a session, or try again later",
                code="sessions_full",
                status=429,
            )

    def keep(self, session: HeldSession, dialogue: Dialogue, tokens: int) -> None:
        """Replace the conversation of a session that is being changed, unless it is gone."""
        if not session.gone.is_set():
            session.dialogue, session.tokens, session.reserved = dialogue, tokens, 0

    @staticmethod
    def check_there(session: HeldSession) -> None:
        """Raise BadRequestError (404) for a session that was deleted meanwhile."""
        if session.gone.is_set():
            raise not_found("session", session.id)

    def _wait(self, session: HeldSession) -> None:
        session.timer = asyncio.get_running_loop().call_later(session.ttl, self._forget, session)

    def _forget(self, session: HeldSession) -> None:
        session.gone.set()
        session.dialogue = Dialogue()
        if session.live is not None:
            session.live.give_up()
        if session.timer is not None:
            session.timer.cancel()
        self._held.pop(session.id, None)
