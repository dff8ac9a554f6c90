"""What was said, and the requests that are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from processors.inputs import Modality
from vlmserve.chat.media import Medium
from vlmserve.chat.mentions import Mention, question_text
from vlmserve.chat.options import of_place


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """media go before the text."""

    text: str
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A question and its answer, maybe a stopped one."""

    question: Question
    answer: str


def make_question(
    line: str, mentions: Sequence[Mention], named: Sequence[Medium], waiting: Sequence[Medium], turns: Sequence[Turn]
) -> Question:
    """The question of a line, with the media that it names and those that waited for one."""
    said = [medium for turn in turns for medium in turn.question.media]
    labels = [
        _label(medium, [*said, *waiting, *named[:number]], [*said, *waiting, *named])
        for number, medium in enumerate(named)
    ]
    return Question(text=question_text(line, mentions, labels), media=(*waiting, *named))


def chat_messages(
    system: str | None, turns: Sequence[Turn], question: Question | None, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The whole conversation in OpenAI's form, media included."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        messages.append({"role": "user", "content": _content(turn.question, options)})
        messages.append({"role": "assistant", "content": turn.answer})
    if question is not None:
        messages.append({"role": "user", "content": _content(question, options)})
    return messages


def chat_body(model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """A streamed request."""
    return {
        "model": model,
        "messages": messages,
        **of_place(options, "request"),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _label(medium: Medium, before: Sequence[Medium], all_media: Sequence[Medium]) -> str:
    if sum(one.modality is medium.modality for one in all_media) == 1:
        return f"the {medium.kind}"
    return f"{medium.kind} {1 + sum(one.modality is medium.modality for one in before)}"


def _content(question: Question, options: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    if not question.media:
        return question.text
    parts = [_part(medium, options) for medium in question.media]
    if question.text:
        parts.append({"type": "text", "text": question.text})
    return parts


def _part(medium: Medium, options: Mapping[str, Any]) -> dict[str, Any]:
    if medium.modality is Modality.VIDEO:
        return {"type": "video_url", "video_url": {"url": medium.url}, **of_place(options, "video", "both")}
    image = {"url": medium.url, **of_place(options, "picture")}
    return {"type": "image_url", "image_url": image, **of_place(options, "both")}
