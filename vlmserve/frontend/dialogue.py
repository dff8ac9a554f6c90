"""A conversation that goes on: what was said and shown stays, with processed media, and more is added at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from processors.families.base import modality_of
from processors.processed import ProcessedMedium, held, nbytes_of
from vlmserve.frontend.chat_messages import MEDIA_PARTS, Message, map_parts

Parts: TypeAlias = str | Sequence[Mapping[str, Any]]
"""The content of a message: a text, or parts in OpenAI's form."""

OPEN_END = "\ue000vlmserve goes on here\ue000"
"""Stands in a rendered prompt where the next words of the user will stand. Its characters are for private use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogue:
    """The messages of a conversation, whose media are processed. nbytes: memory that it takes, in bytes; text counts as
    Python writes it. window: a name for its KV, which was computed with video that has left (`LiveRules.windowed`); ""
    if it is that of its own prompt."""

    messages: tuple[Message, ...] = ()
    num_media: int = 0
    nbytes: int = 0
    window: str = ""

    def with_content(self, content: Parts) -> Dialogue:
        """Return the conversation with more of what the user says. It goes on with the user's last message, or begins a
        new one behind an answer."""
        if self.messages and self.messages[-1]["role"] == "user":
            joined = {**self.messages[-1], "content": [*_listed(self.messages[-1]["content"]), *_listed(content)]}
            return self._of((*self.messages[:-1], joined), _listed(content))
        return self.with_message({"role": "user", "content": content})

    def with_message(self, message: Message) -> Dialogue:
        """Return the conversation with a message behind it."""
        return self._of((*self.messages, message), [message])

    @property
    def last_part(self) -> Mapping[str, Any] | None:
        """Return the last part of what the user says, if the conversation ends with it."""
        if not self.messages or self.messages[-1]["role"] != "user":
            return None
        parts = _listed(self.messages[-1]["content"])
        return parts[-1] if parts else None

    def with_last_part(self, part: Mapping[str, Any]) -> Dialogue:
        """Return the conversation with another part in the place of its last one."""
        *before, last = _listed(self.messages[-1]["content"])
        gone = _Added()
        gone.count(last)
        rest = replace(self, num_media=self.num_media - gone.media, nbytes=self.nbytes - gone.nbytes)
        return rest._of((*self.messages[:-1], {**self.messages[-1], "content": [*before, part]}), [part])

    def with_messages(self, messages: Sequence[Message]) -> Dialogue:
        """Return a conversation of other messages."""
        return Dialogue(window=self.window)._of(tuple(messages), messages)

    def salt(self, given: str | None) -> str | None:
        """Return the salt of its prefixes in the cache. given: that of its requests."""
        return f"{given or ''} window {self.window}" if self.window else given

    def _of(self, messages: tuple[Message, ...], more: Sequence[Any]) -> Dialogue:
        added = _Added()
        added.count(more)
        return replace(
            self, messages=messages, num_media=self.num_media + added.media, nbytes=self.nbytes + added.nbytes
        )


@dataclass(slots=True)
class _Added:
    """What some JSON with processed media adds."""

    media: int = 0
    nbytes: int = 0

    def count(self, value: Any) -> None:
        if isinstance(value, ProcessedMedium):
            self.media, self.nbytes = self.media + 1, self.nbytes + nbytes_of(value)
        elif isinstance(value, Mapping):
            for name, one in value.items():
                self.nbytes += len(name)
                self.count(one)
        elif isinstance(value, list | tuple):
            for one in value:
                self.count(one)
        else:
            self.nbytes += len(repr(value))


def _listed(content: Parts) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def with_media(messages: Sequence[Message], media: Sequence[ProcessedMedium]) -> list[Message]:
    """Put processed media, held for many requests, in the places of those that messages name, in their order."""
    left = iter(media)

    def loaded(part: Any, _place: str) -> Any:
        if part["type"] not in MEDIA_PARTS:
            return part
        medium = held(next(left))
        kind = modality_of(medium).value
        return {"type": kind, kind: medium}

    return map_parts(messages, loaded)


def open_ended(messages: Sequence[Message]) -> list[Message]:
    """Return messages with a mark where the next words of the user will stand."""
    return list(Dialogue(messages=tuple(messages)).with_content(OPEN_END).messages)
