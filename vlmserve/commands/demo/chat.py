"""One question to the server, with a view for the page after each step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from vlmserve.commands.client.chat_client import ChatAnswer, ChatClient, ServerError, Stats
from vlmserve.commands.client.conversation import OptionError
from vlmserve.commands.demo.conversation import (
    Message,
    Question,
    answer_message,
    answered_turns,
    demo_body,
    error_message,
    files_of,
    question_message,
    read_settings,
)
from vlmserve.commands.demo.drawing import Drawing, draw_marks
from vlmserve.commands.demo.seen import SeenMedium, see


@dataclass(frozen=True, kw_only=True)
class AnswerDetails:
    """The details of a complete answer. num_media: of its prompt. media: the last of them, as the model saw them.

    notes: sentences for the user. drawing: the answer's boxes and points.
    """

    stats: Stats
    num_media: int
    media: tuple[SeenMedium, ...]
    notes: tuple[str, ...]
    drawing: Drawing | None


@dataclass(frozen=True, kw_only=True)
class View:
    """A state of the page. messages: the conversation. outcome: None until the answer is complete."""

    messages: Sequence[Message]
    outcome: AnswerDetails | None = None


class Chat:
    """Asks a model on a server. It holds no conversation: the page has it."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self._client = client
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
            body = await asyncio.to_thread(demo_body, self.model, turns, question, read_settings(form))
            async with aclosing(self._client.ask(body)) as answers:
                async for answer in answers:
                    yield View(messages=[*shown, answer_message(answer.text)])
            outcome = await asyncio.to_thread(_outcome, answer, files_of(turns, question))
        except (OptionError, ServerError, OSError) as error:
            said = [answer_message(answer.text)] if answer.text else []
            yield View(messages=[*shown, *said, error_message(str(error))])
            return
        yield View(messages=[*shown, answer_message(answer.text)], outcome=outcome)


def _outcome(answer: ChatAnswer, files: Sequence[Path]) -> AnswerDetails | None:
    if answer.stats is None:
        return None
    drawing = draw_marks(answer.text, answer.media, files)
    return AnswerDetails(
        stats=answer.stats,
        num_media=len(answer.media),
        media=see(answer.media, files),
        notes=(*answer.notes, *(drawing.problems if drawing is not None else ())),
        drawing=drawing,
    )
