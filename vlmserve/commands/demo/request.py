"""From a conversation to the body of a chat completion request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processors.formats import HEAD_BYTES, modality_of
from processors.inputs import Modality
from vlmserve.commands.client import conversation
from vlmserve.commands.client.conversation import chat_messages, media_part
from vlmserve.commands.client.data_urls import data_url
from vlmserve.commands.client.options import OptionError, parse_option
from vlmserve.commands.demo.conversation import Question, Turn

FIELDS = ("max_tokens", "temperature", "top_p", "seed", "detail", "min_pixels", "max_pixels", "fps")
"""Options of the requests that the page asks for. min_pixels, max_pixels: of each picture."""


def read_settings(texts: Mapping[str, str | None]) -> dict[str, Any]:
    """What the fields of a form say; an empty one leaves it to the server.

    Raises OptionError for anything but numbers. Whether they are in range the server knows best.
    """
    given = {name: text.strip() for name, text in texts.items() if text is not None and text.strip()}
    try:
        return {name: parse_option(name, text) for name, text in given.items()}
    except OptionError as error:
        raise OptionError(f"{error}, or empty to leave it to the server") from None


def chat_body(model: str, turns: Sequence[Turn], question: Question, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A streamed request with the whole conversation, media included as data: URLs. Reads the files: OSError."""

    def part(path: Path) -> dict[str, Any]:
        """What is neither a picture nor a video goes as a picture: the server knows best what is wrong with it."""
        data = path.read_bytes()
        if modality_of(data[:HEAD_BYTES]) is Modality.VIDEO:
            of_clips = {name: value for name, value in settings.items() if name == "fps"}
            return media_part(Modality.VIDEO, data_url(data), of_clips)
        return media_part(Modality.IMAGE, data_url(data), settings)

    messages = chat_messages(None, turns, question, part)
    return {**conversation.chat_body(model, messages, settings), "return_mm_report": True}


def files_of(turns: Sequence[Turn], question: Question) -> list[Path]:
    """All media of the conversation, in the order of the prompt."""
    return [path for asked in (*(turn.question for turn in turns), question) for path in asked.media]
