"""What a batch's lines may ask: the same endpoints as requests, called within the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel

from vlmserve.api.body import checked_within
from vlmserve.api.caller import Caller
from vlmserve.api.chat import whole_chat
from vlmserve.api.completion_protocol import CompletionRequest
from vlmserve.api.completions import whole_completion
from vlmserve.api.protocol import ChatCompletionRequest, ScoreRequest
from vlmserve.api.request_id import new_id
from vlmserve.api.responses.api import ResponsesApi
from vlmserve.api.responses.protocol import ResponsesRequest
from vlmserve.api.score import whole_scores
from vlmserve.api.served_model import ServedModel

Answer: TypeAlias = Callable[[dict[str, Any], Caller], Awaitable[Mapping[str, Any]]]
"""A request's body and who asks -> the answer's body. Raises what `errors` describes."""

_Model = TypeVar("_Model", bound=BaseModel)


def batch_endpoints(served: ServedModel, responses: ResponsesApi) -> dict[str, Answer]:
    """By their paths."""

    def endpoint(
        kind: str, model: type[_Model], answer: Callable[[_Model, str, Caller], Awaitable[Mapping[str, Any]]]
    ) -> Answer:
        async def call(raw: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
            body = await asyncio.to_thread(checked_within, raw, model, served.settings)
            served.check_name(body.model)  # type: ignore[attr-defined]
            return await answer(body, new_id(kind), caller)

        return call

    return {
        "/v1/chat/completions": endpoint("chatcmpl", ChatCompletionRequest, lambda *asked: whole_chat(served, *asked)),
        "/v1/completions": endpoint("cmpl", CompletionRequest, lambda *asked: whole_completion(served, *asked)),
        "/v1/responses": endpoint("resp", ResponsesRequest, responses.whole),
        "/v1/score": endpoint("score", ScoreRequest, lambda *asked: whole_scores(served, *asked)),
    }
