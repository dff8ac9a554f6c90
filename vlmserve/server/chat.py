"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from fastapi import Request
from starlette.responses import JSONResponse, Response

from vlmserve.server.answers import AnswerHead, AnswerWriter
from vlmserve.server.auth import client_of, owner_of, tenant_of
from vlmserve.server.body import read_body
from vlmserve.server.convert import to_generate_request
from vlmserve.server.errors import describe
from vlmserve.server.protocol import ChatCompletionRequest
from vlmserve.server.request_id import name_answer
from vlmserve.server.served_model import ServedModel
from vlmserve.server.streaming import DONE, EventStream, sse_event, while_connected
from vlmserve.server.tracing import asked_of
from vlmserve.tokenizer.tokenizer_manager import ChoiceOutput


async def complete_chat(served: ServedModel, request: Request) -> Response:
    """The answer, or its stream. Raises what `errors` describes; nothing has been sent then."""
    chat = await read_body(request, ChatCompletionRequest, served.settings)
    served.check_name(chat.model)
    own_id = name_answer(request, "chatcmpl", chat.rid)
    head = AnswerHead(id=chat.rid or own_id, created=int(time.time()), model=chat.model)
    request.state.asked = asked_of(chat)
    find_file = served.files.for_owner(owner_of(request))
    client, owner, ended = client_of(request), owner_of(request), request.state.answers.add
    wanted = to_generate_request(
        chat, own_id, find_file=find_file, client=client, owner=owner, tenant=tenant_of(request), ended=ended
    )
    writer = AnswerWriter(
        head,
        served.manager.builder.tokenizer,
        n=wanted.n,
        logprobs=bool(chat.logprobs),
        mm_report=bool(chat.return_mm_report),
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
    )
    if not chat.stream:
        async with aclosing(served.manager.generate(wanted)) as outputs:
            answer = await while_connected(request.receive, writer.whole(outputs))
        if "prompt_logprobs" in answer:  # of a long prompt they are many
            return await asyncio.to_thread(JSONResponse, answer)
        return JSONResponse(answer)
    batches = served.manager.stream(wanted)
    try:
        # Whatever is wrong shows before the first output, while a status can still be sent.
        first = await while_connected(request.receive, anext(batches))
    except BaseException:
        await batches.aclose()
        raise
    return EventStream(_events(writer, first, batches), batches)


async def _events(
    writer: AnswerWriter, first: Sequence[ChoiceOutput], rest: AsyncIterator[Sequence[ChoiceOutput]]
) -> AsyncGenerator[bytes, None]:
    """The stream's events. What fails after the beginning is told in an event of its own, as OpenAI does."""
    try:
        yield writer.events(first)
        async for items in rest:
            yield writer.events(items)
        yield writer.usage_event()
    except Exception as error:
        yield sse_event(describe(error)[1])
    yield DONE
