"""The served model, as all of its endpoints see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from vlmserve.api.errors import describe
from vlmserve.api.file_store import FileStore
from vlmserve.api.streaming import DONE
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.answers import AnswerWriter
from vlmserve.frontend.openai.completion_answers import CompletionWriter
from vlmserve.frontend.openai.json_bodies import sse_event
from vlmserve.frontend.parsers.answer import AnswerFormats
from vlmserve.frontend.requests import GenerateReqInput
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model. name: its name for clients. files: the uploaded files that requests may name. formats: how it
    writes calls and thoughts."""

    name: str
    manager: TokenizerManager
    files: FileStore
    settings: ServerSettings
    formats: AnswerFormats

    def check_name(self, name: str) -> None:
        """Raise BadRequestError (404) for a model that is not served here."""
        if name != self.name:
            what = f"there is no model {name!r} here, only {self.name}"
            raise BadRequestError(what, param="model", code="model_not_found", status=404)

    async def events(
        self, prepare: Callable[[], tuple[Sequence[GenerateReqInput], AnswerWriter | CompletionWriter]]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. prepare: returns the requests, and the writer of their answers.

        An error before the first output is raised, while a status can still be sent. A later error becomes an event, as
        OpenAI's API has it.
        """
        wanted, writer = prepare()
        async with aclosing(self.manager.stream(*wanted)) as batches:
            yield writer.events(await anext(batches))
            try:
                async for items in batches:
                    yield writer.events(items)
                yield writer.usage_event()
            except Exception as error:
                yield sse_event(describe(error)[1])
            yield DONE
