"""Limits of requests' bodies: the memory that all of them take, and how much there is in a JSON body."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError

FREE_BYTES = 64 * 1024
"""The bytes of a body that need no room, so that large, slow bodies keep no small requests out. --max-connections
limits these bytes."""


class BodyBudget:
    """Counts the bytes of all bodies. Room is taken as bytes arrive; a mere announcement costs a client nothing."""

    def __init__(self, settings: ServerSettings) -> None:
        self.held = 0
        self._most = int(max(settings.max_bodies_mib, settings.max_body_mib) * 2**20)

    def take(self, count: int) -> None:
        """Take room. Raises BadRequestError (503) if there is none."""
        if self.held + count > self._most:
            raise BadRequestError(
                f"the bodies of requests take {self.held} bytes together, the limit is {self._most} (setting "
                "--max-bodies-mib); try again later",
                code="bodies_too_large_together",
                status=503,
            )
        self.held += count


class HeldBody:
    """A body as it arrives. held: the bytes that it has taken of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self.data = bytearray()
        self.held = 0
        self._budget = budget

    def add(self, part: bytes) -> None:
        """Add a part. Raises BadRequestError (503) if there is no room for it."""
        more = len(self.data) + len(part) - FREE_BYTES - self.held
        if more > 0:
            self._budget.take(more)
            self.held += more
        self.data += part

    def release(self) -> None:
        """Give the room back, when nothing made of the body is left."""
        self._budget.held -= self.held
        self.held = 0


class BodyBudgetMiddleware:
    """Gives each request a `HeldBody`, as `state.body`, until the request has ended: its texts and media are parts of
    it."""

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


# What may have many items, and what these may have many parts in. Lists of token ids are no such lists.
_LISTS = ("messages", "input", "query", "prompt", "items", "labels", "tools")
_PARTS = ("content", "output", "tool_calls")


def check_values(body: bytes | bytearray, limit: int, what: str = "the request body") -> None:
    """Raise BadRequestError for JSON of too many values. A value stands before each comma and behind each bracket.
    Commas in texts count, too; only very long texts have enough of them to matter."""
    if sum(map(body.count, (b",", b"[", b"{"))) > limit:
        raise BadRequestError(
            f"{what} has more values than {limit}, commas and opening brackets in texts included (setting "
            "--max-json-values)",
            code="too_many_values",
        )


def check_items(raw: dict[str, Any], settings: ServerSettings) -> None:
    """Raise BadRequestError for too many items or parts. Values of a wrong type are left to later checks."""
    most, parts = settings.max_items_per_request, 0
    for field in _LISTS:
        items = raw.get(field)
        if not isinstance(items, list) or (items and isinstance(items[0], int)):
            continue
        if len(items) > most:
            raise _too_many(f"{len(items)} items in {field}", f"{most} (setting --max-items-per-request)", field)
        given = [item.get(name) for item in items if isinstance(item, dict) for name in _PARTS]
        parts += sum(len(some) for some in given if isinstance(some, list))
        if parts > settings.max_parts_per_request:
            limit = f"{settings.max_parts_per_request} (setting --max-parts-per-request)"
            raise _too_many(f"{parts} parts in the items of {field}", limit, field)


def _too_many(what: str, limit: str, field: str) -> BadRequestError:
    return BadRequestError(f"the request has {what}, the limit is {limit}", param=field, code="too_many_parts")
