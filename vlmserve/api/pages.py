"""Lists come in pages: their parameters and fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from typing_extensions import TypedDict

from vlmserve.frontend.openai.json_bodies import invalid_value

_T = TypeVar("_T")


class Page(TypedDict):
    """A page of a list, the newest first unless order=asc."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_query(most: int, usual: int) -> dict[str, dict[str, Any]]:
    """Return the schemas of the query parameters. most, usual: items of a page."""
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most, "default": usual},
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string", "description": "the id that the page before ended with"},
    }


def page_of(
    query: Mapping[str, str], oldest_first: Sequence[_T], id_of: Callable[[_T], str], *, most: int, usual: int
) -> tuple[list[_T], dict[str, Any]]:
    """Return the items of the page that a client asks for, and the page without its data. Raises BadRequestError."""
    limit, order, after = query.get("limit", str(usual)), query.get("order", "desc"), query.get("after")
    if not (limit.isdecimal() and 1 <= int(limit) <= most):
        raise invalid_value("limit", f"limit is {limit[:80]!r}; it must be between 1 and {most}")
    if order not in ("asc", "desc"):
        raise invalid_value("order", f"order is {order[:80]!r}; it must be asc or desc")
    found = list(oldest_first) if order == "asc" else list(reversed(oldest_first))
    if after is not None:
        places = [place for place, item in enumerate(found) if id_of(item) == after]
        if not places:
            raise invalid_value("after", f"after is {after[:80]!r}; it must be an id in the list")
        found = found[places[0] + 1 :]
    items = found[: int(limit)]
    ids = {"first_id": id_of(items[0]) if items else None, "last_id": id_of(items[-1]) if items else None}
    return items, {"object": "list", **ids, "has_more": len(items) < len(found)}
