"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from vlmserve.server.answers import AnswerHead, AnswerWriter
from vlmserve.server.auth import client_of, owner_of
from vlmserve.server.body import BodyLimits, read_body
from vlmserve.server.convert import to_generate_request
from vlmserve.server.errors import JsonResponse, describe
from vlmserve.server.file_store import FileStore
from vlmserve.server.protocol import ChatCompletionRequest
from vlmserve.server.streaming import DONE, EventStream, sse_event, while_connected
from vlmserve.tokenizer.tokenizer_manager import ChoiceOutput, TokenizerManager
from vlmserve_common.errors import BadRequestError


class ChatEndpoint:
    """Answers chat completion requests for the models named, which may bring uploaded files.

    max_n: most choices of a request.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        model_names: Sequence[str],
        files: FileStore,
        *,
        body_limits: BodyLimits,
        max_n: int,
    ) -> None:
        self._manager = manager
        self._files = files
        self._model_names = tuple(model_names)
        self._body_limits = body_limits
        self._max_n = max_n

    async def __call__(self, request: Request) -> Response:
        """The answer, or its stream. Raises what `errors` describes; nothing has been sent then."""
        chat = await read_body(request, ChatCompletionRequest, self._body_limits)
        check_model(chat.model, self._model_names)
        head = AnswerHead(id=f"chatcmpl-{uuid.uuid4().hex}", created=int(time.time()), model=chat.model)
        find_file = self._files.for_owner(owner_of(request))
        wanted = to_generate_request(chat, head.id, max_n=self._max_n, find_file=find_file, client=client_of(request))
        writer = AnswerWriter(
            head,
            self._manager.builder.tokenizer,
            n=wanted.n,
            logprobs=bool(chat.logprobs),
            mm_report=bool(chat.return_mm_report),
        )
        outputs = self._manager.generate(wanted)
        headers = {"X-Request-Id": head.id}
        if not chat.stream:
            async with aclosing(outputs):
                answer = await while_connected(request.receive, writer.whole(outputs))
            return JsonResponse(answer, headers=headers)
        try:
            # Whatever is wrong shows before the first output, while a status can still be sent.
            first = await while_connected(request.receive, anext(outputs))
        except BaseException:
            await outputs.aclose()
            raise
        include_usage = bool(chat.stream_options and chat.stream_options.include_usage)
        stream = EventStream(_events(writer, first, outputs, include_usage=include_usage), outputs)
        stream.headers.update(headers)
        return stream


def check_model(name: str, known: Sequence[str]) -> None:
    """Raises BadRequestError (404) for a model that is not served here."""
    if name not in known:
        raise BadRequestError(
            f"there is no model {name!r} here, only {', '.join(known)}",
            param="model",
            code="model_not_found",
            status=404,
        )


async def _events(
    writer: AnswerWriter, first: ChoiceOutput, rest: AsyncIterator[ChoiceOutput], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream's events. What fails after the beginning is told in an event of its own, as OpenAI does."""
    try:
        async for chunk in writer.chunks(_chain(first, rest), include_usage=include_usage):
            yield sse_event(chunk)
    except Exception as error:
        yield sse_event(describe(error)[1])
    yield DONE


async def _chain(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item
