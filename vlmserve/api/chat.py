"""POST /v1/chat/completions, and the same answers for callers in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from vlmserve.api.answer_types import ChatCompletion, ChatCompletionChunk
from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.errors import Error
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import EventStream, ServedModel, while_connected
from vlmserve.api.tracing import asked_of
from vlmserve.frontend.openai.answers import AnswerHead, AnswerWriter
from vlmserve.frontend.openai.convert import to_generate_request, tool_use
from vlmserve.frontend.openai.protocol import ChatCompletionRequest
from vlmserve.frontend.parsers.answer import AnswerReading
from vlmserve.frontend.requests import Caller, GenerateReqInput


@operation(
    *("POST", "/v1/chat/completions", "createChatCompletion", "Answers"),
    request=ChatCompletionRequest,
    example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
    answer=ChatCompletion,
    events=ChatCompletionChunk | Error,
    ends_with_done=True,
    errors=MODEL_ERRORS,
)
async def complete_chat(served: ServedModel, request: Request) -> Response:
    """Answer a conversation, whole or as a stream. Raises the errors of `errors` before anything has been sent."""
    chat = await read_body(request, ChatCompletionRequest, served.settings)
    served.check_name(chat.model)
    own_id = name_answer(request, "chatcmpl", chat.rid)
    request.state.asked = asked_of(chat)
    if not chat.stream:
        answer = await while_connected(request.receive, whole_chat(served, chat, own_id, caller_of(request)))
        if chat.logprobs or "prompt_logprobs" in answer or chat.return_token_ids:  # they are many
            return await served.threads.run(JSONResponse, answer)
        return JSONResponse(answer)
    events = chat_events(served, chat, own_id, caller_of(request))
    return await EventStream.begin(request.receive, events)


async def whole_chat(served: ServedModel, chat: ChatCompletionRequest, own_id: str, caller: Caller) -> dict[str, Any]:
    """Return the chat.completion. own_id: an id that no other request has. Raises the errors of `errors`."""
    wanted, writer = prepare_chat(served, chat, own_id, caller)
    async with aclosing(served.manager.generate(*wanted)) as outputs:
        return await writer.whole(outputs)


def chat_events(
    served: ServedModel, chat: ChatCompletionRequest, own_id: str, caller: Caller
) -> AsyncGenerator[bytes, None]:
    """Return the events of the stream, as `ServedModel.events` does."""
    return served.events(partial(prepare_chat, served, chat, own_id, caller))


def prepare_chat(
    served: ServedModel, chat: ChatCompletionRequest, own_id: str, caller: Caller
) -> tuple[list[GenerateReqInput], AnswerWriter]:
    """Return the engine's request, and the writer of its answer. Raises BadRequestError."""
    head = AnswerHead(id=chat.rid or own_id, created=int(time.time()), model=served.name_for(chat))
    find_file = served.files.for_owner(caller.owner)
    wanted = to_generate_request(chat, own_id, caller, formats=served.formats, find_file=find_file)
    (wanted,) = served.adapted(chat, [wanted])
    writer = AnswerWriter(
        head,
        served.manager.builder.tokenizer,
        n=wanted.n,
        logprobs=bool(chat.logprobs),
        mm_report=bool(chat.return_mm_report),
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        usage_details=bool(chat.return_usage_details),
        token_ids=bool(chat.return_token_ids),
        spec_details=bool(chat.return_spec_tokens_details),
        reading=AnswerReading(calls=tool_use(chat, served.formats), reasoning=served.formats.reasoning),
    )
    return [wanted], writer
