"""How much there is in a JSON body, before work is done for it: a million empty parts fit into 30 MB, and take a
gigabyte and tens of seconds to check."""

from __future__ import annotations

from typing import Any

import numpy as np

from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError

_BEFORE_VALUES = np.isin(np.arange(256), list(b",[{"))
_QUOTE = ord('"')
_BLOCK = 2**20


def check_values(body: bytes | bytearray, settings: ServerSettings) -> None:
    """Raises BadRequestError for a body of too many values. It need not be right JSON."""
    limit = settings.max_json_values
    if sum(map(body.count, (b",", b"[", b"{"))) <= limit:  # most of them stand in texts, if there are many
        return
    if count_values(body, limit) > limit:
        raise BadRequestError(
            f"the request body has more values than {limit} (setting --max-json-values)", code="too_many_values"
        )


def count_values(body: bytes | bytearray, enough: int) -> int:
    """Of some JSON, the commas and opening brackets outside its texts: at least half as many as its values, and never
    more. Counting ends soon after there are `enough`."""
    count = quotes = 0
    lone = b""  # a backslash at the end of a block, of which the next one has what it escapes
    for start in range(0, len(body), _BLOCK):
        # Escapes go first: what is left of quotes are borders of texts.
        block = (lone + body[start : start + _BLOCK]).replace(b"\\\\", b"")
        lone = b"\\" if block.endswith(b"\\") else b""
        plain = np.frombuffer(block.removesuffix(b"\\").replace(b'\\"', b""), np.uint8)
        before = np.cumsum(plain == _QUOTE, dtype=np.uint8) + np.uint8(quotes)  # it wraps around at 256, which is even
        count += int(np.count_nonzero(_BEFORE_VALUES[plain] & (before % 2 == 0)))
        if count > enough:
            break
        quotes = int(before[-1]) % 2 if len(before) else quotes
    return count


def check_messages(raw: dict[str, Any], settings: ServerSettings) -> None:
    """Raises BadRequestError for too many messages, or parts in them. What is not as it must be is left to others."""
    for field in ("messages", "input"):
        messages = raw.get(field)
        if isinstance(messages, list):
            _check_list(messages, field, settings)


def _check_list(messages: list[Any], field: str, settings: ServerSettings) -> None:
    most = settings.max_messages_per_request
    if len(messages) > most:
        raise _too_many(f"{len(messages)} messages", f"{most} (setting --max-messages-per-request)", field)
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    most = settings.max_parts_per_request
    if parts > most:
        raise _too_many(f"{parts} parts in its messages", f"{most} (setting --max-parts-per-request)", field)


def _too_many(what: str, limit: str, field: str) -> BadRequestError:
    return BadRequestError(f"the request has {what}, the limit is {limit}", param=field, code="too_many_parts")
