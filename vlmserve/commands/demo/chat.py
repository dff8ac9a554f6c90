"""One question put to the server, as the page goes through it: what to show after each step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from vlmserve.commands.client.answer import Answer, Stats
from vlmserve.commands.client.chat_client import ChatClient, ServerError
from vlmserve.commands.client.options import OptionError
from vlmserve.commands.demo.conversation import (
    Message,
    Question,
    answer_message,
    answered_turns,
    error_message,
    question_message,
)
from vlmserve.commands.demo.drawing import Drawing, draw_marks
from vlmserve.commands.demo.request import chat_body, files_of, read_settings
from vlmserve.commands.demo.seen import Medium, see


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What there is to say about a whole answer. num_media: of its prompt; media: the last of them, as the model saw
    them. notes: what the user should know, in sentences. drawing: of the answer's boxes and points."""

    stats: Stats
    num_media: int
    media: tuple[Medium, ...]
    notes: tuple[str, ...]
    drawing: Drawing | None


@dataclass(frozen=True, kw_only=True)
class View:
    """What the page shows. messages: the conversation. outcome: once the answer is whole."""

    messages: Sequence[Message]
    outcome: Outcome | None = None


class Chat:
    """A model on a server, to ask. Holds no conversation: each one is its page's."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self._client = client
        self.model = model

    async def ask(
        self, messages: Sequence[Message], question: Question, form: Mapping[str, str | None]
    ) -> AsyncGenerator[View, None]:
        """Views from the question on; whatever goes wrong is in the last one. Closing it ends the request.

        messages: what was said before. form: see `read_settings`.
        """
        shown = [*messages, question_message(question)]
        yield View(messages=shown)
        turns = answered_turns(messages)
        answer = Answer(text="")
        try:
            body = await asyncio.to_thread(chat_body, self.model, turns, question, read_settings(form))
            async with aclosing(self._client.ask(body)) as answers:
                async for answer in answers:
                    yield View(messages=[*shown, answer_message(answer.text)])
            outcome = await asyncio.to_thread(_outcome, answer, files_of(turns, question))
        except (OptionError, ServerError, OSError) as error:
            said = [answer_message(answer.text)] if answer.text else []
            yield View(messages=[*shown, *said, error_message(str(error))])
            return
        yield View(messages=[*shown, answer_message(answer.text)], outcome=outcome)


def _outcome(answer: Answer, files: Sequence[Path]) -> Outcome | None:
    if answer.stats is None:
        return None
    drawing = draw_marks(answer.text, answer.media, files)
    return Outcome(
        stats=answer.stats,
        num_media=len(answer.media),
        media=see(answer.media, files),
        notes=(*answer.notes, *(drawing.problems if drawing is not None else ())),
        drawing=drawing,
    )
