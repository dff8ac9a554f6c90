"""What was said, and the requests that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from processors.inputs import Modality
from vlmserve.commands.client.options import of_place

M = TypeVar("M")
"""What a client names its pictures and videos by."""


@dataclass(frozen=True, kw_only=True)
class Question(Generic[M]):
    """media: pictures and videos, which go before the text."""

    text: str
    media: tuple[M, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Turn(Generic[M]):
    """A question and its answer, maybe a stopped one."""

    question: Question[M]
    answer: str


def chat_messages(
    system: str | None, turns: Sequence[Turn[M]], question: Question[M] | None, part: Callable[[M], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The whole conversation in OpenAI's form. part: makes a medium's, see `media_part`."""

    def content(asked: Question[M]) -> str | list[dict[str, Any]]:
        if not asked.media:
            return asked.text
        text = [{"type": "text", "text": asked.text}] if asked.text else []
        return [*map(part, asked.media), *text]

    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": content(turn.question)})
        messages.append({"role": "assistant", "content": turn.answer})
    if question is not None:
        messages.append({"role": "user", "content": content(question)})
    return messages


def media_part(modality: Modality, url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A picture or video of a message, with those options that are about it."""
    if modality is Modality.VIDEO:
        return {"type": "video_url", "video_url": {"url": url}, **of_place(options, "video", "both")}
    image = {"url": url, **of_place(options, "picture")}
    return {"type": "image_url", "image_url": image, **of_place(options, "both")}


def chat_body(model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """A streamed request."""
    return {
        "model": model,
        "messages": messages,
        **of_place(options, "request"),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
