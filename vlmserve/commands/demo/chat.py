"""The page's conversation: messages in Gradio's form, the requests made of them, and a view after each step.

The shown messages are the only memory. A question without an answer, because it failed or was stopped early, stays on
the page. The model is not told of it, since it would make every later request fail, too.
"""

from __future__ import annotations

import asyncio
import mimetypes
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from processors.formats import HEAD_BYTES, modality_of
from processors.inputs import Modality
from vlmserve.commands.client import conversation
from vlmserve.commands.client.chat_client import ChatAnswer, ChatClient, ServerError
from vlmserve.commands.client.conversation import OptionError, chat_messages, media_part, parse_option
from vlmserve.commands.client.media import MediumError, data_url
from vlmserve.commands.demo.pictures import Drawing, Question, SeenMedium, draw_marks, see

Message: TypeAlias = Mapping[str, Any]
Turn = conversation.ChatTurn[Path]
ERROR_TITLE = "Error"


def question_message(question: Question) -> dict[str, Any]:
    """Return a question in the page's form."""
    content = [_file(path) for path in question.media]
    if question.text:
        content.append(_text(question.text))
    return {"role": "user", "content": content}


def answer_message(text: str) -> dict[str, Any]:
    """Return an answer, or its beginning, in the page's form."""
    return {"role": "assistant", "content": [_text(text)]}


def error_message(text: str) -> dict[str, Any]:
    """Return an error that stands in place of an answer."""
    return {**answer_message(text), "metadata": {"title": ERROR_TITLE}}


def answered_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Return the answered questions with their answers, in order."""
    turns: list[Turn] = []
    asked: Question | None = None
    answers: list[Message] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "assistant":
            answers.append(message)
            continue
        answer = "".join(map(_texts, answers))
        if asked is not None and answer and not any(map(_is_error, answers)):
            turns.append(Turn(question=asked, answer=answer))
        asked, answers = None if message is None else _question(message), []
    return tuple(turns)


def last_question(messages: Sequence[Message]) -> tuple[Sequence[Message], Question] | None:
    """Return the last question and the messages before it; None if there is none."""
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "user":
            return messages[:place], _question(messages[place])
    return None


def _question(message: Message) -> Question:
    parts = message["content"]
    files = [Path(part["file"]["path"]) for part in parts if part["type"] == "file"]
    return Question(text=_texts(message), media=tuple(files))


def _texts(message: Message) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def _is_error(message: Message) -> bool:
    return (message.get("metadata") or {}).get("title") == ERROR_TITLE


def _file(path: Path) -> dict[str, Any]:
    """Return the part of a file. The guessed type matters for display only."""
    return {"type": "file", "file": {"path": str(path), "mime_type": mimetypes.guess_type(path.name)[0]}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


LABELS = {
    "max_tokens": "most tokens of an answer",
    "temperature": "temperature",
    "top_p": "top-p",
    "seed": "seed",
    "detail": "detail of pictures",
    "min_pixels": "least pixels of a picture",
    "max_pixels": "most pixels of a picture",
    "fps": "frames a second of a clip",
}
"""The options in the page's form, in its order, and their labels. Errors name these, too."""

# Not the names that are common words.
_IN_ERRORS = re.compile(r"\b(max_tokens|top_p|min_pixels|max_pixels|fps)\b")
_PLACE = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\][\w.]*")


def read_settings(texts: Mapping[str, str | None]) -> dict[str, Any]:
    """Read the fields of a form. An empty field leaves the value to the server.

    Raises OptionError for anything but numbers. The server checks their range.
    """
    given = {name: text.strip() for name, text in texts.items() if text is not None and text.strip()}
    try:
        return {name: parse_option(name, text) for name, text in given.items()}
    except OptionError as error:
        raise OptionError(f"{error}, or empty to leave it to the server") from None


def in_the_pages_words(text: str, asked: Sequence[Question] = ()) -> str:
    """Return a server's sentence with the page's labels for options, and files' names for their places.

    asked: all questions of the request.
    """

    def name(place: re.Match[str]) -> str:
        message, part = int(place[1]) // 2, int(place[2])  # answers stand between questions
        media = asked[message].media if message < len(asked) else ()
        return media[part].name if part < len(media) else place[0]

    return _PLACE.sub(name, _IN_ERRORS.sub(lambda found: f'"{LABELS[found[0]]}"', text))


def demo_body(model: str, turns: Sequence[Turn], question: Question, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make a streamed request of the whole conversation, with media as data: URLs.

    Raises MediumError for an empty file, and OSError for one that cannot be read.
    """

    def part(path: Path) -> dict[str, Any]:
        """Make the part of a file. An unknown file goes as a picture, so that the server reports its mistake."""
        data = path.read_bytes()
        if not data:
            raise MediumError(f"{path.name} is empty: there is nothing in this file, or its upload broke off")
        if modality_of(data[:HEAD_BYTES]) is Modality.VIDEO:
            of_clips = {name: value for name, value in settings.items() if name == "fps"}
            return media_part(Modality.VIDEO, data_url(data), of_clips)
        return media_part(Modality.IMAGE, data_url(data), settings)

    messages = chat_messages(None, turns, question, part)
    return {**conversation.chat_body(model, messages, settings), "return_mm_report": True}


def files_of(turns: Sequence[Turn], question: Question) -> list[Path]:
    """Return all media of the conversation, in the order of the prompt."""
    return [path for asked in (*(turn.question for turn in turns), question) for path in asked.media]


@dataclass(frozen=True, kw_only=True)
class View:
    """A state of the page. messages: the conversation. answer: the complete one; None before.

    media: the last ones of the prompt, as the model saw them. drawing: the answer's boxes and points.
    """

    messages: Sequence[Message]
    answer: ChatAnswer | None = None
    media: tuple[SeenMedium, ...] = ()
    drawing: Drawing | None = None


class Chat:
    """Asks a model on a server. It holds no conversation: the page has it."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self.client = client
        self.model = model

    async def ask(
        self, messages: Sequence[Message], question: Question, form: Mapping[str, str | None]
    ) -> AsyncGenerator[View, None]:
        """Yield views from the question on. The last one has the error if there is one. Closing ends the request.

        messages: the conversation before. form: see `read_settings`.
        """
        shown = [*messages, question_message(question)]
        yield View(messages=shown)
        turns = answered_turns(messages)
        answer = ChatAnswer(text="")
        try:
            if not question.text.strip() and not question.media:
                raise OptionError("there is no question: write one, or add a picture or clip")
            body = await asyncio.to_thread(demo_body, self.model, turns, question, read_settings(form))
            async with aclosing(self.client.ask(body)) as answers:
                async for answer in answers:
                    yield View(messages=[*shown, answer_message(answer.text)])
            files = files_of(turns, question)
            drawing = await asyncio.to_thread(draw_marks, answer.text, answer.media, files)
            seen = await asyncio.to_thread(see, answer.media, files)
        except (OptionError, MediumError, ServerError, OSError) as error:
            said = [answer_message(answer.text)] if answer.text else []
            asked = [*(turn.question for turn in turns), question]
            yield View(messages=[*shown, *said, error_message(in_the_pages_words(str(error), asked))])
            return
        answer = replace(answer, notes=tuple(map(in_the_pages_words, answer.notes)))
        yield View(messages=[*shown, answer_message(answer.text)], answer=answer, media=seen, drawing=drawing)
