"""From a conversation to the body of a chat completion request."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from processors.fetch.sniffing import HEAD_BYTES, modality_of
from processors.inputs import Modality
from vlmserve.demo.conversation import Question, Turn
from vlmserve_common.errors import VlmserveError


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSettings:
    """What a request asks for beside its messages; None leaves it to the server.

    detail, min_pixels, max_pixels (area): of each picture. fps: frames a second taken of each video.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    detail: Literal["auto", "low", "high"] | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None


_WHOLE = ("max_tokens", "seed", "min_pixels", "max_pixels")


class SettingError(VlmserveError):
    """A setting is not what it has to be; the message names it."""


def read_settings(texts: Mapping[str, str | None]) -> RequestSettings:
    """What the fields of a form say, by the names of RequestSettings; an empty one leaves it to the server.

    Raises SettingError for anything but numbers. Whether they are in range the server knows best.
    """
    given = {name: text.strip() for name, text in texts.items() if text is not None and text.strip()}
    values: dict[str, Any] = {name: text if name == "detail" else _number(name, text) for name, text in given.items()}
    return RequestSettings(**values)


def _number(name: str, text: str) -> int | float:
    try:
        value = int(text) if name in _WHOLE else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        kind = "whole number" if name in _WHOLE else "number"
        raise SettingError(f"{name} is {text!r}; it must be a {kind}, or empty to leave it to the server")
    return value


def chat_body(model: str, turns: Sequence[Turn], question: Question, settings: RequestSettings) -> dict[str, Any]:
    """A streamed request with the whole conversation, media included as data: URLs. Reads the files: OSError."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": _content(turn.question, settings)})
        messages.append({"role": "assistant", "content": turn.answer})
    messages.append({"role": "user", "content": _content(question, settings)})
    sampling = {name: getattr(settings, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    return {
        "model": model,
        "messages": messages,
        **_given(sampling),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_mm_report": True,
    }


def _content(question: Question, settings: RequestSettings) -> list[dict[str, Any]]:
    parts = [_part(path.read_bytes(), settings) for path in question.files]
    if question.text or not parts:
        parts.append({"type": "text", "text": question.text})
    return parts


def _part(data: bytes, settings: RequestSettings) -> dict[str, Any]:
    """What is neither a picture nor a video goes as a picture: the server knows best what is wrong with it."""
    url = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
    if modality_of(data[:HEAD_BYTES]) is Modality.VIDEO:
        return {"type": "video_url", "video_url": {"url": url}, **_given({"fps": settings.fps})}
    image = {"url": url, **_given({"detail": settings.detail})}
    area = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    return {"type": "image_url", "image_url": image, **_given(area)}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def files_of(turns: Sequence[Turn], question: Question) -> list[Path]:
    """All media of the conversation, in the order of the prompt."""
    return [path for asked in (*(turn.question for turn in turns), question) for path in asked.files]
