"""Conversations with a server: questions, answers, options, and the requests made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from processors.inputs import Modality
from vlmserve.config.plain_problems import did_you_mean
from vlmserve_common.errors import VlmserveError

M = TypeVar("M")
"""The type by which a client names its pictures and videos."""


class OptionError(VlmserveError):
    """There is no such option, or it cannot have this value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of requests: a name of `/set`, of `--set` and of the flags.

    type: of its values. place: the part of the request that it belongs to.
    """

    type: type[int] | type[float] | type[str]
    help: str
    place: Literal["request", "picture", "video", "both"] = "request"


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "temperature": Option(type=float, help="0 always takes the most likely token"),
        "top_p": Option(type=float, help="sample among the most likely tokens that together have this probability"),
        "top_k": Option(type=int, help="sample among this many of the most likely tokens"),
        "min_p": Option(type=float, help="leave out tokens less likely than this part of the most likely one"),
        "max_tokens": Option(type=int, help="longest answer, in tokens"),
        "seed": Option(type=int, help="the same seed gives the same answer"),
        "stop": Option(type=str, help="end the answer before this text"),
        "repetition_penalty": Option(type=float, help="above 1: fewer repetitions"),
        "presence_penalty": Option(type=float, help="above 0: fewer repetitions, however often a token occurred"),
        "frequency_penalty": Option(type=float, help="above 0: fewer repetitions, the more often a token occurred"),
        "detail": Option(type=str, place="picture", help="detail of pictures: auto, low or high"),
        "min_pixels": Option(type=int, place="both", help="smallest area of a picture or frame, in pixels"),
        "max_pixels": Option(type=int, place="both", help="largest area of a picture or frame, in pixels"),
        "fps": Option(type=float, place="video", help="frames per second taken of a video"),
        "nframes": Option(type=int, place="video", help="frames taken of a video"),
    }
)
"""All options. The server checks the values, since it knows the model."""


def option_named(name: str) -> str:
    """Return the option's proper name. OptionError, with a guess, if there is none."""
    proper = name.lower().replace("-", "_")
    if proper in OPTIONS:
        return proper
    guess = did_you_mean(proper, OPTIONS, f"; there are {', '.join(OPTIONS)}")
    raise OptionError(f"there is no option {name!r}{guess}")


def parse_option(name: str, text: str) -> Any:
    """Convert a value to its option's type. OptionError."""
    kind = OPTIONS[name].type
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        allowed = "a whole number" if kind is int else "a number"
        raise OptionError(f"{name} is {text!r}; it must be {allowed}")
    return value


def parse_assignment(text: str) -> tuple[str, Any]:
    """Read "name=value". OptionError."""
    name, sign, value = text.partition("=")
    if not sign:
        raise OptionError(f"{text!r} must be NAME=VALUE")
    name = option_named(name.strip())
    return name, parse_option(name, value.strip())


@dataclass(frozen=True, kw_only=True)
class ChatQuestion(Generic[M]):
    """A question. media: pictures and videos, which go before the text."""

    text: str
    media: tuple[M, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChatTurn(Generic[M]):
    """A question and its answer, which may be incomplete."""

    question: ChatQuestion[M]
    answer: str


def chat_messages(
    system: str | None,
    turns: Sequence[ChatTurn[M]],
    question: ChatQuestion[M] | None,
    part: Callable[[M], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the whole conversation in OpenAI's form. part: makes the part of one medium, see `media_part`."""

    def content(asked: ChatQuestion[M]) -> str | list[dict[str, Any]]:
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
    """Return the part of a message for a medium, with the options that concern it."""
    if modality is Modality.AUDIO:
        return {"type": "audio_url", "audio_url": {"url": url}}
    if modality is Modality.VIDEO:
        return {"type": "video_url", "video_url": {"url": url}, **_of_place(options, "video", "both")}
    image = {"url": url, **_of_place(options, "picture")}
    return {"type": "image_url", "image_url": image, **_of_place(options, "both")}


def chat_body(model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a streamed request."""
    return {
        "model": model,
        "messages": messages,
        **_of_place(options, "request"),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _of_place(options: Mapping[str, Any], *places: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if OPTIONS[name].place in places}
