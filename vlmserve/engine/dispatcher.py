"""Dispatch of messages by their type: each type has one handler, and an unknown type is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vlmserve_common.errors import EngineError


class TypeDispatcher:
    """Calls the handler of a message's exact type.

    covers: types that must have a handler; EngineError names the missing ones.
    """

    def __init__(self, handlers: Mapping[type, Callable[[Any], Any]], *, covers: Iterable[type] = ()) -> None:
        self._handlers = dict(handlers)
        missing = sorted(cls.__name__ for cls in covers if cls not in self._handlers)
        if missing:
            raise EngineError(f"no handler for messages of type {', '.join(missing)}")

    def __call__(self, message: object) -> Any:
        """Return the handler's result. EngineError for an unknown type."""
        handler = self._handlers.get(type(message))
        if handler is None:
            known = ", ".join(sorted(cls.__name__ for cls in self._handlers))
            raise EngineError(f"no handler for a message of type {type(message).__name__}; there are some for {known}")
        return handler(message)
