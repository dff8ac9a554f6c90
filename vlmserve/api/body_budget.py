"""The memory that requests' bodies take, from their first byte until their answer's end: one budget for all."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError

FREE_BYTES = 64 * 1024
"""Of a body, what needs no room: large bodies that come slowly must not keep small requests out. --max-connections
bounds these."""


class BodyBudget:
    """Counts what bodies hold. It gives room as bytes come, not as they are announced, which costs nothing."""

    def __init__(self, settings: ServerSettings) -> None:
        self.held = 0
        self._most = int(max(settings.max_bodies_mib, settings.max_body_mib) * 2**20)

    def take(self, count: int) -> None:
        """Raises BadRequestError (503)."""
        if self.held + count > self._most:
            raise BadRequestError(
                f"the bodies of requests take {self.held} bytes together, the limit is {self._most} (setting "
                "--max-bodies-mib); try again later",
                code="bodies_too_large_together",
                status=503,
            )
        self.held += count


class HeldBody:
    """A body as it comes. held: what it has taken of the budget, in bytes."""

    def __init__(self, budget: BodyBudget) -> None:
        self.data = bytearray()
        self.held = 0
        self._budget = budget

    def add(self, part: bytes) -> None:
        """Raises BadRequestError (503) when there is no room for it."""
        more = len(self.data) + len(part) - FREE_BYTES - self.held
        if more > 0:
            self._budget.take(more)
            self.held += more
        self.data += part

    def release(self) -> None:
        """What was made of it is gone, too."""
        self._budget.held -= self.held
        self.held = 0


class BodyBudgetMiddleware:
    """Gives each request a `HeldBody`, as `state.body`, until it has ended: its texts and media are parts of it."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = scope.setdefault("state", {})["body"] = HeldBody(self._budget)
        try:
            await self._app(scope, receive, send)
        finally:
            body.release()
