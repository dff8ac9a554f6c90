"""How much there is in a JSON body, before work is done for it: a million empty parts fit into 30 MB, and take a
gigabyte and tens of seconds to check."""

from __future__ import annotations

from typing import Any

from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError

# What may have many items, and what these may have many parts in. Lists of token ids are no such lists.
_LISTS = ("messages", "input", "query", "prompt", "items", "labels", "tools")
_PARTS = ("content", "output", "tool_calls")


def check_values(body: bytes | bytearray, limit: int, what: str = "the request body") -> None:
    """Raises BadRequestError for JSON of too many values. One stands before each comma and behind each bracket; those
    in texts are counted, too, which takes a context of them to matter."""
    if sum(map(body.count, (b",", b"[", b"{"))) > limit:
        raise BadRequestError(
            f"{what} has more values than {limit}, commas and opening brackets in texts included (setting "
            "--max-json-values)",
            code="too_many_values",
        )


def check_items(raw: dict[str, Any], settings: ServerSettings) -> None:
    """Raises BadRequestError for too many items or parts. What is not as it must be is left to others."""
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
