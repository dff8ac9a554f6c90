"""POST /v1/rerank, as Cohere, Jina and vLLM have it, and vLLM's scores of pairs, at POST /v1/score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypeAlias

from fastapi import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.pooling.contents import content_of, places
from vlmserve.api.pooling.embeddings import PooledUsage
from vlmserve.api.pooling.protocol import ContentObject, PairScoreRequest, RerankRequest
from vlmserve.api.pooling.turns import outputs_of
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import ServedModel, while_connected
from vlmserve.frontend.openai.convert import named
from vlmserve.frontend.openai.json_bodies import invalid_value
from vlmserve.frontend.pooled import check_content, relevance, rerank_fields, rerank_prompt
from vlmserve.frontend.requests import Caller, GenerateReqInput, placed
from vlmserve.ipc.messages import TokenOutput

_Body: TypeAlias = RerankRequest | PairScoreRequest
_Pair: TypeAlias = tuple[str | ContentObject, str | ContentObject]


class RankedDocument(TypedDict):
    """index: the document's place in the request. relevance_score: between 0 and 1."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, Any]]


class Ranking(TypedDict):
    """The documents, the best one first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PooledUsage
    meta: dict[str, Any]


class PairScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class PairScores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PooledUsage


async def _rank(served: ServedModel, request: Request) -> Response:
    """Score documents for a query, and sort them."""
    body = await read_body(request, RerankRequest, served.settings)
    model = served.name_for(body)  # now: an adapter's name may be gone at the end
    name, caller = name_answer(request, "rerank", body.rid), caller_of(request)
    pairs = [(body.query, document) for document in body.documents]
    where = [("query", place) for place in places("documents", body.documents)]
    outputs = await while_connected(request.receive, _computed(served, body, pairs, where, name, caller))
    scores = [relevance(output.logprobs) for output in outputs]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[RankedDocument] = []
    for index in best[: body.top_n]:
        results.append({"index": index, "relevance_score": scores[index]})
        if body.return_documents:
            results[-1]["document"] = _shown(body.documents[index])
    ranking: Ranking = {
        "id": body.rid or name,
        "model": model,
        "results": results,
        "usage": _usage(outputs),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }
    return JSONResponse(ranking)


def _rerank_at(path: str, id: str) -> Any:
    @operation(
        *("POST", path, id, "Answers"),
        request=RerankRequest,
        example={"query": "Is the sky blue?", "documents": ["A blue sky", "A green field"], "top_n": 1},
        answer=Ranking,
        errors=MODEL_ERRORS,
    )
    async def rerank(served: ServedModel, request: Request) -> Response:
        """Score documents for a query, and sort them. Raises the errors of `errors`."""
        return await _rank(served, request)

    return rerank


def _scores_at(path: str, id: str) -> Any:
    @operation(
        *("POST", path, id, "Answers"),
        request=PairScoreRequest,
        example={"text_1": "Is the sky blue?", "text_2": ["A blue sky", "A green field"]},
        answer=PairScores,
        errors=MODEL_ERRORS,
    )
    async def score(served: ServedModel, request: Request) -> Response:
        """Score pairs of texts. Raises the errors of `errors`."""
        return await score_pairs(served, request)

    return score


RERANK_ENDPOINTS = (
    _rerank_at("/v1/rerank", "createRanking"),
    _rerank_at("/v2/rerank", "createCohereRanking"),
    _rerank_at("/rerank", "createJinaRanking"),
    _scores_at("/score", "createPairScores"),
)


async def score_pairs(served: ServedModel, request: Request) -> Response:
    """Score pairs of texts, pictures or videos. Raises the errors of `MODEL_ERRORS`."""
    body = await read_body(request, PairScoreRequest, served.settings)
    model = served.name_for(body)  # now: an adapter's name may be gone at the end
    name, caller = name_answer(request, "score", body.rid), caller_of(request)
    first, second = (one if isinstance(one, list) else [one] for one in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise invalid_value(
            "text_2", f"text_1 has {len(first)} entries and text_2 {len(second)}: give as many, or one text_1"
        )
    repeat = len(second) if len(first) == 1 else 1
    pairs = list(zip(first * repeat, second, strict=True))
    where = list(zip(places("text_1", body.text_1) * repeat, places("text_2", body.text_2), strict=True))
    outputs = await while_connected(request.receive, _computed(served, body, pairs, where, name, caller))
    scores: PairScores = {
        "id": body.rid or name,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"index": index, "object": "score", "score": relevance(output.logprobs)}
            for index, output in enumerate(outputs)
        ],
        "usage": _usage(outputs),
    }
    return JSONResponse(scores)


async def _computed(
    served: ServedModel,
    body: _Body,
    pairs: Sequence[_Pair],
    where: Sequence[tuple[str, str]],
    name: str,
    caller: Caller,
) -> list[TokenOutput]:
    served.task.check("rerank")
    requests = await served.threads.run(_requests, served, body, pairs, where, name, caller)
    return await outputs_of(served, served.adapted(body, requests))


def _requests(
    served: ServedModel,
    body: _Body,
    pairs: Sequence[_Pair],
    where: Sequence[tuple[str, str]],
    name: str,
    caller: Caller,
) -> list[GenerateReqInput]:
    """where: the places of each pair's query and document in the body."""
    task, find_file = served.task, served.files.for_owner(caller.owner)
    instruction, most = body.instruction or body.instruct, getattr(body, "max_tokens_per_doc", None)
    made = []
    for index, ((query, document), place) in enumerate(zip(pairs, where, strict=True)):
        for given, its in zip((query, document), place, strict=True):
            with placed(its):
                check_content(content_of(given))
        document = document if most is None else _cut(served, document, most)
        made.append(
            GenerateReqInput(
                prompt=rerank_prompt(task, content_of(query), content_of(document), instruction, find_file),
                place=place[1] if isinstance(query, str) else " or ".join(place),
                mm_processor_kwargs=body.mm_processor_kwargs or {},
                truncate_prompt_tokens=body.truncate_prompt_tokens,
                truncation_side=body.truncation_side or "left",
                **named(body, f"{name}-{index}", caller),
                **rerank_fields(task),
            )
        )
    return made


def _cut(served: ServedModel, document: str | ContentObject, most: int) -> str | ContentObject:
    """Return a document with the first tokens of its text only."""
    text = document if isinstance(document, str) else document.text
    if text is None:
        return document
    tokenizer = served.manager.builder.tokenizer
    ids = tokenizer.encode(text)
    return text if len(ids) <= most else tokenizer.decode(ids[:most], skip_special_tokens=False)


def _shown(document: str | ContentObject) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else document.model_dump(exclude_none=True)


def _usage(outputs: Sequence[TokenOutput]) -> PooledUsage:
    tokens = sum(output.prompt_tokens for output in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
