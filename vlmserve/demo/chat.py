"""One question put to the server, as the page goes through it: what to show after each step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from vlmserve.client.answer import Answer, read_answer
from vlmserve.client.chat_client import ChatClient, ServerError
from vlmserve.demo.conversation import (
    Message,
    Question,
    answer_message,
    answered_turns,
    error_message,
    question_message,
)
from vlmserve.demo.drawing import Drawing, draw_marks
from vlmserve.demo.request import RequestSettings, chat_body, files_of


@dataclass(frozen=True, kw_only=True)
class View:
    """What the page shows. messages: the conversation. status: of the last answer, once it is there."""

    messages: Sequence[Message]
    status: str = ""
    drawing: Drawing | None = None


class Chat:
    """A model on a server, to ask. Holds no conversation: each one is its page's."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self._client = client
        self.model = model

    async def ask(
        self, messages: Sequence[Message], question: Question, settings: RequestSettings
    ) -> AsyncGenerator[View, None]:
        """Views from the question on; whatever goes wrong is in the last one. Closing it ends the request.

        messages: what was said before.
        """
        shown = [*messages, question_message(question)]
        yield View(messages=shown)
        turns = answered_turns(messages)
        answer = Answer(text="")
        try:
            body = await asyncio.to_thread(chat_body, self.model, turns, question, settings)
            async with aclosing(self._client.stream(body)) as chunks, aclosing(read_answer(chunks)) as answers:
                async for answer in answers:
                    yield View(messages=[*shown, answer_message(answer.text)])
            drawing = await asyncio.to_thread(draw_marks, answer.text, answer.media, files_of(turns, question))
        except (ServerError, OSError) as error:
            said = [answer_message(answer.text)] if answer.text else []
            yield View(messages=[*shown, *said, error_message(str(error))])
            return
        view = View(messages=[*shown, answer_message(answer.text)], status=_status(answer, drawing))
        yield replace(view, drawing=drawing)


def _status(answer: Answer, drawing: Drawing | None) -> str:
    lines: list[str] = [] if answer.stats is None else [answer.stats.line()]
    problems: Any = () if drawing is None else drawing.problems
    return "\n".join([*lines, *answer.notes, *problems])
