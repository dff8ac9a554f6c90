"""POST /v1/score: how likely labels are behind a query and each of some items, as SGLang has it. A reranker scores
pairs, as vLLM has it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Literal

from fastapi import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.answer_types import PromptTokensDetails
from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.pooling.protocol import PairScoreRequest
from vlmserve.api.pooling.rerank import PairScores, score_pairs
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import ServedModel, while_connected
from vlmserve.frontend.chat_messages import FindFile
from vlmserve.frontend.openai.answers import finite
from vlmserve.frontend.openai.convert import named
from vlmserve.frontend.openai.json_bodies import invalid_value
from vlmserve.frontend.openai.protocol import ScoreRequest
from vlmserve.frontend.requests import Caller, ChatPrompt, GenerateReqInput, Prompt, TextPrompt, TokensPrompt
from vlmserve.frontend.scores import label_scores, softmax
from vlmserve.ipc.messages import ReturnOptions, SamplingParams, TokenOutput


class ScoreUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Scores(TypedDict):
    """The score and the logprob of each label, for each item."""

    id: str
    object: Literal["scoring"]
    created: int
    model: str
    scores: list[list[float]]
    logprobs: list[list[float]]
    usage: ScoreUsage


_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)


@operation(
    *("POST", "/v1/score", "createScore", "Answers"),
    request=ScoreRequest | PairScoreRequest,
    example={"query": "Is the sky blue?", "labels": ["yes", "no"]},
    answer=Scores | PairScores,
    errors=MODEL_ERRORS,
)
async def score(served: ServedModel, request: Request) -> Response:
    """Score how likely labels are behind a query and each of some items, or pairs. Raises the errors of `errors`."""
    if served.task.name == "rerank":
        return await score_pairs(served, request)
    body = await read_body(request, ScoreRequest, served.settings)
    served.check_name(body.model)
    name = name_answer(request, "score", body.rid)
    return JSONResponse(await while_connected(request.receive, whole_scores(served, body, name, caller_of(request))))


async def whole_scores(served: ServedModel, body: ScoreRequest, name: str, caller: Caller) -> Scores:
    """Return the body of the answer. name: an id that no other request has. Raises the errors of `errors`."""
    model = served.name_for(body)  # now: an adapter's name may be gone at the end
    wanted = await served.threads.run(_requests, served, body, name, caller)  # of thousands of items
    wanted = served.adapted(body, wanted)
    outputs = await _whole(served, wanted)
    each = wanted[0].num_choices
    rows = [_logprobs(body, outputs[at : at + each]) for at in range(0, len(outputs), each)]
    prompt_tokens = sum(output.prompt_tokens for output in outputs)
    return {
        "id": body.rid or name,
        "object": "scoring",
        "created": int(time.time()),
        "model": model,
        "scores": [softmax(row) if body.apply_softmax else [math.exp(logprob) for logprob in row] for row in rows],
        "logprobs": [[finite(logprob) for logprob in row] for row in rows],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
        },
    }


def _requests(served: ServedModel, body: ScoreRequest, own_id: str, caller: Caller) -> list[GenerateReqInput]:
    """Return a request for each item: the next token's logprobs at the labels' ids, or the labels' texts as
    continuations. Raises BadRequestError for fields that contradict each other."""
    if (body.label_token_ids is None) == (body.labels is None):
        raise invalid_value("label_token_ids", "give label_token_ids, or labels as texts: one of them")
    if body.items is not None and not body.items:
        raise invalid_value("items", "items is an empty list; it must have an item, or be left out")
    made, most = len(body.query) * len(body.items or ()), int(served.settings.max_body_mib * 2**20)
    if made > most:  # each prompt has a copy of the query
        what = f"a query of {len(body.query)} with {len(body.items or ())} items makes {made} characters or ids"
        raise invalid_value("items", f"{what}; the limit is {most} (setting --max-body-mib)")
    find_file = served.files.for_owner(caller.owner)
    return [
        GenerateReqInput(
            prompt=_prompt(body, item, index, find_file),
            sampling_params=_ONE_TOKEN,
            mm_processor_kwargs=body.mm_processor_kwargs or {},
            returns=ReturnOptions(token_ids_logprob=tuple(body.label_token_ids or ())),
            continuations=tuple(body.labels or ()),
            **named(body, f"{own_id}-{index}", caller),
        )
        for index, item in enumerate(body.items or [None])
    ]


def _prompt(body: ScoreRequest, item: str | list[int] | None, index: int, find_file: FindFile) -> Prompt:
    query, first = body.query, body.item_first
    if isinstance(query, str):
        if isinstance(item, list):
            raise invalid_value(
                f"items[{index}]", f"items[{index}] is token ids, and query is text: give both as one of them"
            )
        return TextPrompt(text=f"{item or ''}{query}" if first else f"{query}{item or ''}")
    if isinstance(query[0], int):
        if isinstance(item, str):
            raise invalid_value(
                f"items[{index}]", f"items[{index}] is text, and query is token ids: give both as one of them"
            )
        ids = [*(item or ()), *query] if first else [*query, *(item or ())]
        return TokensPrompt(ids=tuple(ids))
    if isinstance(item, list):
        raise invalid_value(f"items[{index}]", f"items[{index}] is token ids; behind a conversation it must be text")
    return ChatPrompt(
        messages=_with_item(query, item, first),  # kept as the client wrote them
        template_kwargs=body.chat_template_kwargs or {},
        find_file=find_file,
    )


def _with_item(messages: Sequence[Any], item: str | None, first: bool) -> Sequence[Any]:
    """Return a conversation whose last message has the item's text, too."""
    if item is None:
        return messages
    last = messages[-1]
    if last["role"] != "user":
        raise invalid_value("query", f"query ends with a message of {last['role']!r}; items go into one of 'user'")
    content = last["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    text = {"type": "text", "text": item}
    return [*messages[:-1], {**last, "content": [text, *parts] if first else [*parts, text]}]


async def _whole(served: ServedModel, wanted: Sequence[GenerateReqInput]) -> list[TokenOutput]:
    """Return the output of each choice, which comes as one."""
    found: dict[int, TokenOutput] = {}
    async with aclosing(served.manager.stream(*wanted)) as batches:
        async for items in batches:
            found |= {item.index: item.output for item in items}
    return [found[index] for index in sorted(found)]


def _logprobs(body: ScoreRequest, outputs: Sequence[TokenOutput]) -> list[float]:
    if body.labels is not None:
        scores = label_scores(body.labels, [output.prompt_logprobs for output in outputs])
        return [score.logprob for score in scores]
    [output] = outputs
    assert output.logprobs is not None
    return list(output.logprobs[0].token_ids_logprobs)
