"""POST /v1/embeddings, as OpenAI, vLLM and Jina have it, and POST /v2/embed, as Cohere has it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from fastapi import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.pooling.contents import content_of, media_part, places
from vlmserve.api.pooling.protocol import CohereEmbedRequest, ContentObject, EmbeddingRequest, PooledRequest
from vlmserve.api.pooling.turns import outputs_of
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import ServedModel, while_connected
from vlmserve.frontend.chat_messages import FindFile
from vlmserve.frontend.openai.convert import named
from vlmserve.frontend.openai.json_bodies import json_text
from vlmserve.frontend.pooled import Content, embed_fields, embed_prompt
from vlmserve.frontend.requests import Caller, ChatPrompt, GenerateReqInput, Prompt, TokensPrompt, placed
from vlmserve.frontend.tasks import Task, with_instruction
from vlmserve.ipc.messages import TokenOutput
from vlmserve_common.errors import BadRequestError

_PLACE = re.compile(r"messages\[(\d+)\]")
_SIDES: dict[str, Literal["left", "right"]] = {"START": "left", "END": "right"}
# Jina's and Cohere's words for the kinds of inputs, and the names of instructions in checkpoints
_PROMPT_NAMES = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "search_query": "query",
    "search_document": "document",
}


class PooledUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """A vector: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


class CohereEmbeddings(TypedDict):
    """embeddings: the vectors in each of the types asked for."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"]


@operation(
    *("POST", "/v1/embeddings", "createEmbedding", "Answers"),
    request=EmbeddingRequest,
    example={"input": ["Is the sky blue?", "A blue sky"]},
    answer=Embeddings,
    errors=MODEL_ERRORS,
)
async def embed(served: ServedModel, request: Request) -> Response:
    """Make vectors of texts, pictures and videos. Raises the errors of `errors`."""
    body = await read_body(request, EmbeddingRequest, served.settings)
    model = served.name_for(body)  # now: an adapter's name may be gone at the end
    name, caller = name_answer(request, "embd", body.rid), caller_of(request)
    outputs = await while_connected(request.receive, _computed(served, body, _requests, name, caller))
    return await _written(served, _openai_answer, model, body, outputs)


@operation(
    *("POST", "/v2/embed", "createCohereEmbedding", "Answers"),
    request=CohereEmbedRequest,
    example={"texts": ["Is the sky blue?"], "input_type": "search_query", "embedding_types": ["float"]},
    answer=CohereEmbeddings,
    errors=MODEL_ERRORS,
)
async def embed_cohere(served: ServedModel, request: Request) -> Response:
    """Make vectors of texts and pictures, in Cohere's form. Raises the errors of `errors`."""
    body = await read_body(request, CohereEmbedRequest, served.settings)
    served.check_name(body.model)
    name, caller = name_answer(request, "embd", body.rid), caller_of(request)
    outputs = await while_connected(request.receive, _computed(served, body, _cohere_requests, name, caller))
    return await _written(served, _cohere_answer, body, name, outputs)


async def whole_embeddings(served: ServedModel, body: EmbeddingRequest, name: str, caller: Caller) -> Embeddings:
    """Return the body of the answer. name: an id that no other request has. Raises the errors of `errors`."""
    model = served.name_for(body)
    return _openai_answer(model, body, await _computed(served, body, _requests, name, caller))


async def _computed(served: ServedModel, body: Any, make: Any, name: str, caller: Caller) -> list[TokenOutput]:
    served.task.check("embed")
    wanted = served.adapted(body, await served.threads.run(make, served, body, name, caller))
    given, prompt = getattr(body, "messages", None), wanted[0].prompt
    instructed = given and isinstance(prompt, ChatPrompt) and len(prompt.messages) > len(given)
    with _places_as_sent(1 if instructed else 0):
        return await outputs_of(served, wanted)


@contextmanager
def _places_as_sent(inserted: int) -> Iterator[None]:
    """Let errors count the messages that the client sent, and not those in front of them."""
    try:
        yield
    except BadRequestError as error:
        if inserted and error.param and (found := _PLACE.match(error.param)):
            sent = f"messages[{int(found[1]) - inserted}]"
            error.message = error.message.replace(found[0], sent)
            error.param = sent + error.param[found.end() :]
        raise


async def _written(served: ServedModel, write: Any, *args: Any) -> Response:
    def written() -> bytes:
        return json_text(write(*args))

    return Response(await served.threads.run(written), media_type="application/json")


def _requests(served: ServedModel, body: EmbeddingRequest, name: str, caller: Caller) -> list[GenerateReqInput]:
    task = served.task
    fields = embed_fields(
        task, dimensions=body.dimensions, normalize=body.normalized if body.normalize is None else body.normalize
    )
    find_file = served.files.for_owner(caller.owner)
    instruction = _instruction(task, body.instruction, body.task)
    if body.messages is not None:
        prompt = ChatPrompt(
            messages=with_instruction(body.messages, task, instruction),  # type: ignore[arg-type]
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.chat_template_kwargs or {},
            find_file=find_file,
            add_special_tokens=body.add_special_tokens,
        )
        return [_request(body, prompt, "", f"{name}-0", caller, fields)]
    given = body.input
    several = isinstance(given, list) and not isinstance(given[0], int)
    inputs: list[Any] = given if several else [given]  # type: ignore[assignment]
    where = places("input", given) if several else ["input"]

    def prompt_of(one: str | ContentObject | list[int], place: str) -> Prompt:
        if isinstance(one, list):
            return TokensPrompt(ids=tuple(one))
        return _prompt(task, content_of(one), place, instruction, find_file)

    return [
        _request(body, prompt_of(one, place), place, f"{name}-{index}", caller, fields)
        for index, (one, place) in enumerate(zip(inputs, where, strict=True))
    ]


def _cohere_requests(
    served: ServedModel, body: CohereEmbedRequest, name: str, caller: Caller
) -> list[GenerateReqInput]:
    task, find_file = served.task, served.files.for_owner(caller.owner)
    fields = embed_fields(task, dimensions=body.output_dimension)
    if body.truncate in _SIDES:
        fields |= {"truncate_prompt_tokens": body.max_tokens or -1, "truncation_side": _SIDES[body.truncate]}
    instruction = _instruction(task, body.instruction, body.input_type)
    field, inputs = next(
        (field, given) for field in ("texts", "images", "inputs") if (given := getattr(body, field)) is not None
    )
    contents: list[Content] = [
        one.content if field == "inputs" else [media_part("image", one)] if field == "images" else one for one in inputs
    ]
    return [
        _request(body, _prompt(task, content, place, instruction, find_file), place, f"{name}-{index}", caller, fields)
        for index, (content, place) in enumerate(zip(contents, places(field, contents), strict=True))
    ]


def _prompt(task: Task, content: Content, place: str, instruction: str | None, find_file: FindFile) -> Prompt:
    with placed(place):
        return embed_prompt(task, content, instruction, find_file)


def _request(
    body: PooledRequest, prompt: Prompt, place: str, name: str, caller: Caller, fields: dict[str, Any]
) -> GenerateReqInput:
    return GenerateReqInput(
        prompt=prompt,
        place=place,
        mm_processor_kwargs=body.mm_processor_kwargs or {},
        **{
            "truncate_prompt_tokens": body.truncate_prompt_tokens,
            "truncation_side": body.truncation_side or "left",
            **named(body, name, caller),
            **fields,
        },
    )


def _instruction(task: Task, given: str | None, kind: str | None) -> str | None:
    """Return the instruction that a request asks for: its own, or the checkpoint's for a kind of inputs."""
    return given if given is not None else task.prompts.get(_PROMPT_NAMES.get(kind or "", kind or ""))


def _rows(outputs: Sequence[TokenOutput]) -> list[np.ndarray]:
    return [output.hidden_states[0] for output in outputs if output.hidden_states is not None]


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _openai_answer(model: str, body: EmbeddingRequest, outputs: Sequence[TokenOutput]) -> Embeddings:
    text = "base64" in (body.encoding_format, body.embedding_type)
    tokens = sum(output.prompt_tokens for output in outputs)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _base64(row) if text else row.tolist()}
            for index, row in enumerate(_rows(outputs))
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _cohere_answer(body: CohereEmbedRequest, name: str, outputs: Sequence[TokenOutput]) -> CohereEmbeddings:
    rows = _rows(outputs)
    write = {
        "float": lambda row: row.tolist(),
        "base64": _base64,
        "ubinary": lambda row: np.packbits(row > 0).tolist(),
        "binary": lambda row: (np.packbits(row > 0).astype(np.int16) - 128).tolist(),
    }
    tokens = sum(output.prompt_tokens for output in outputs)
    return {
        "id": body.rid or name,
        "embeddings": {kind: [write[kind](row) for row in rows] for kind in body.embedding_types or ["float"]},
        "texts": body.texts or [],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
        "response_type": "embeddings_by_type",
    }
