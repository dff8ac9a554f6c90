"""The media of stored responses, as their requests prepared them, for responses that go on from them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from processors.families.base import modality_of
from processors.processed import ProcessedMedium, nbytes_of
from vlmserve.frontend.chat_messages import MEDIA_PARTS, Message, map_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """The media that one request brought, in their order. whole: they are those of its whole conversation."""

    media: tuple[ProcessedMedium, ...]
    whole: bool
    nbytes: int
    timer: asyncio.TimerHandle


class HeldMedia:
    """The media of responses by their ids, in one event loop. Those used the longest ago are forgotten first: later
    requests load these again.

    most_bytes: of all of them; 0 keeps none. ttl: seconds that they are kept after their last use.
    """

    def __init__(self, most_bytes: int, ttl: float) -> None:
        self._most_bytes, self._ttl = most_bytes, ttl
        self._kept: dict[str, _Kept] = {}
        self.nbytes = 0

    @property
    def holds(self) -> bool:
        """Return True if it may keep any."""
        return self._most_bytes > 0

    def find(self, chain: Sequence[str]) -> list[ProcessedMedium]:
        """Return the last media of a conversation, in their order, as far back as all are there. chain: the ids of its
        responses, the newest first."""
        found: list[tuple[str, _Kept]] = []
        for response_id in chain:
            kept = self._kept.get(response_id)
            if kept is None:
                break
            found.append((response_id, kept))
            if kept.whole:
                break
        found.reverse()  # the newest is used last: without it, those before it are of no use
        for response_id, kept in found:
            self.keep(response_id, kept.media, whole=kept.whole)
        return [medium for _, kept in found for medium in kept.media]

    def keep(self, response_id: str, media: Sequence[ProcessedMedium], *, whole: bool) -> None:
        """Keep the media that the request of a response brought. They count as used now. whole: they are all of its
        conversation."""
        self.forget(response_id)
        nbytes = sum(map(nbytes_of, media))
        if nbytes > self._most_bytes or not self.holds:
            return
        while self.nbytes + nbytes > self._most_bytes:
            self.forget(next(iter(self._kept)))
        timer = asyncio.get_running_loop().call_later(self._ttl, self.forget, response_id)
        self._kept[response_id] = _Kept(media=tuple(media), whole=whole, nbytes=nbytes, timer=timer)
        self.nbytes += nbytes

    def forget(self, response_id: str) -> None:
        """Forget the media of a response, if they are there."""
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            kept.timer.cancel()
            self.nbytes -= kept.nbytes


def num_media(messages: Sequence[Message]) -> int:
    """Return how many media messages bring."""
    return sum(part.get("type") in MEDIA_PARTS for message in messages for part in _parts(message))


def media_in(messages: Sequence[Message]) -> list[ProcessedMedium]:
    """Return the processed media of messages, in their order."""
    values = [part.get(part["type"]) for message in messages for part in _parts(message)]
    return [value for value in values if isinstance(value, ProcessedMedium)]


def with_last_media(messages: Sequence[Message], media: Sequence[ProcessedMedium]) -> list[Message]:
    """Put processed media in the places of the last ones that messages bring."""
    unknown, left = num_media(messages) - len(media), iter(media)

    def placed(part: Any, _place: str) -> Any:
        nonlocal unknown
        if part.get("type") not in MEDIA_PARTS:
            return part
        unknown -= 1
        if unknown >= 0:
            return part
        medium = next(left)
        kind = modality_of(medium).value
        return {"type": kind, kind: medium}

    return map_parts(messages, placed)


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()
