"""A chat as the page keeps it: messages in Gradio's form, which are plain dictionaries, and what they say.

The messages shown are the only memory there is. A question without an answer (it failed, or was stopped before a word
came) stays on the page and is left out of what the model is told: it would make every later request fail, too.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from vlmserve.commands.client import conversation

Message: TypeAlias = Mapping[str, Any]
Question = conversation.Question[Path]
Turn = conversation.Turn[Path]
ERROR_TITLE = "Error"


def question_message(question: Question) -> dict[str, Any]:
    """A question as the page shows it."""
    content = [_file(path) for path in question.media]
    if question.text:
        content.append(_text(question.text))
    return {"role": "user", "content": content}


def answer_message(text: str) -> dict[str, Any]:
    """An answer, or its beginning, as the page shows it."""
    return {"role": "assistant", "content": [_text(text)]}


def error_message(text: str) -> dict[str, Any]:
    """An error in an answer's place."""
    return {**answer_message(text), "metadata": {"title": ERROR_TITLE}}


def answered_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """The questions that were answered, and their answers, in order."""
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
    """The last question and the messages before it; None where there is none."""
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
    """The type, guessed from the name, says only how the page shows the file."""
    return {"type": "file", "file": {"path": str(path), "mime_type": mimetypes.guess_type(path.name)[0]}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
