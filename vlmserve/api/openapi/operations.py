"""All operations of the API: what each takes and answers. The document is made of this table (see `document`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vlmserve.api.batches.api import BatchRequest
from vlmserve.api.completion_protocol import CompletionRequest
from vlmserve.api.control import AbortBody, ProfileBody
from vlmserve.api.files import EXPIRY_S, PURPOSES
from vlmserve.api.openapi.answers.chat import ChatCompletion, ChatCompletionChunk
from vlmserve.api.openapi.answers.completions import (
    DetokenizedPrompt,
    Scores,
    TextCompletion,
    TextCompletionChunk,
    TokenizedPrompt,
)
from vlmserve.api.openapi.answers.operators import (
    AbortedRequests,
    CacheInUse,
    Error,
    FlushedCache,
    Health,
    ModelList,
    ModelObject,
    PauseState,
    ProfileTrace,
    ServerState,
    Version,
    Warmup,
)
from vlmserve.api.openapi.answers.responses import DeletedResponse, InputItems, ResponseEvent, ResponseObject
from vlmserve.api.openapi.answers.stored import BatchList, BatchObject, DeletedFile, FileList, FileObject
from vlmserve.api.protocol import ChatCompletionRequest, ScoreRequest, WarmupRequest
from vlmserve.api.responses.protocol import ResponsesRequest
from vlmserve.api.tokenization import DetokenizeRequest, TokenizeRequest

Access = Literal["open", "key", "admin", "monitor"]

# What may go wrong with: a body; a field's value; an id; anything that the engine is asked.
_BODY = (400, 408, 413)
_ID = (404,)
_ENGINE = (500, 503)
_MADE = (*_BODY, *_ID, 409, 429, 499, *_ENGINE, 504)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """id: what generated clients call it. request: the type of its JSON body, and an example of it, to which the
    model's name is added; form: the schema of a multipart body. answer: the type of its JSON with the status 200, or
    the media type of other content. events: the type of the JSON in the events that it answers with `stream: true`;
    ends_with_done: behind them comes one of [DONE]. query: the schemas of its query parameters. errors: statuses of
    errors that are its own; conflict: the type of its 409, if that is more than an error. access: which key it needs,
    where there are keys; "monitor": operators' if they have one, else none.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    id: str
    tag: str
    summary: str
    answer: Any
    request: Any = None
    example: dict[str, Any] | None = None
    form: dict[str, Any] | None = None
    needs_body: bool = True
    events: Any = None
    ends_with_done: bool = False
    query: dict[str, dict[str, Any]] | None = None
    errors: tuple[int, ...] = ()
    conflict: Any = Error
    access: Access = "key"


def _limit(most: int, usual: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": usual}


_HELLO = {"role": "user", "content": "Hello"}
_AFTER: dict[str, Any] = {"type": "string", "description": "the id that the page before ended with"}
_ORDER: dict[str, Any] = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
_UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[1]},
    },
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        id="createChatCompletion",
        tag="Answers",
        summary="Answer a conversation, whole or as a stream",
        request=ChatCompletionRequest,
        example={"messages": [_HELLO], "max_tokens": 64},
        answer=ChatCompletion,
        events=ChatCompletionChunk | Error,
        ends_with_done=True,
        errors=_MADE,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        id="createCompletion",
        tag="Answers",
        summary="Go on from a text, or from token ids",
        request=CompletionRequest,
        example={"prompt": "Hello", "max_tokens": 16},
        answer=TextCompletion,
        events=TextCompletionChunk | Error,
        ends_with_done=True,
        errors=_MADE,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        id="createResponse",
        tag="Responses",
        summary="Answer a conversation, whole or as a stream, and keep it",
        request=ResponsesRequest,
        example={"input": "Hello", "max_output_tokens": 64},
        answer=ResponseObject,
        events=ResponseEvent,
        errors=(*_MADE, 507),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}",
        id="getResponse",
        tag="Responses",
        summary="A response that was kept",
        answer=ResponseObject,
        errors=_ID,
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{response_id}",
        id="deleteResponse",
        tag="Responses",
        summary="Forget a response",
        answer=DeletedResponse,
        errors=_ID,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        id="listInputItems",
        tag="Responses",
        summary="What a response was asked with",
        query={"limit": _limit(100, 20), "order": _ORDER, "after": _AFTER},
        answer=InputItems,
        errors=(400, *_ID),
    ),
    Operation(
        method="POST",
        path="/v1/score",
        id="createScore",
        tag="Answers",
        summary="How likely labels are behind a query and each of some items",
        request=ScoreRequest,
        example={"query": "Is the sky blue?", "labels": ["yes", "no"]},
        answer=Scores,
        errors=_MADE,
    ),
    Operation(
        method="POST",
        path="/v1/warmup",
        id="createWarmup",
        tag="Answers",
        summary="Encode media ahead of time",
        request=WarmupRequest,
        example={"messages": [_HELLO]},
        answer=Warmup,
        errors=_MADE,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        id="tokenize",
        tag="Tokens",
        summary="The ids of a prompt",
        request=TokenizeRequest,
        example={"prompt": "Hello"},
        answer=TokenizedPrompt,
        errors=_MADE,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        id="detokenize",
        tag="Tokens",
        summary="The text of ids",
        request=DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        answer=DetokenizedPrompt,
        errors=(*_BODY, *_ID),
    ),
    Operation(
        method="GET",
        path="/v1/models",
        id="listModels",
        tag="Models",
        summary="The model that is served",
        answer=ModelList,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model_id}",
        id="getModel",
        tag="Models",
        summary="The model of that name",
        answer=ModelObject,
        errors=_ID,
    ),
    Operation(
        method="POST",
        path="/v1/files",
        id="createFile",
        tag="Files",
        summary="Upload a file",
        form=_UPLOAD,
        answer=FileObject,
        errors=(*_BODY, 429, 500, 507),
    ),
    Operation(
        method="GET",
        path="/v1/files",
        id="listFiles",
        tag="Files",
        summary="Uploaded files",
        query={"limit": _limit(10_000, 10_000), "order": _ORDER, "after": _AFTER, "purpose": {"type": "string"}},
        answer=FileList,
        errors=(400,),
    ),
    Operation(
        method="GET",
        path="/v1/files/{file_id}",
        id="getFile",
        tag="Files",
        summary="What is known of a file",
        answer=FileObject,
        errors=_ID,
    ),
    Operation(
        method="DELETE",
        path="/v1/files/{file_id}",
        id="deleteFile",
        tag="Files",
        summary="Forget a file",
        answer=DeletedFile,
        errors=_ID,
    ),
    Operation(
        method="GET",
        path="/v1/files/{file_id}/content",
        id="getFileContent",
        tag="Files",
        summary="A file's bytes",
        answer="application/octet-stream",
        errors=_ID,
    ),
    Operation(
        method="POST",
        path="/v1/batches",
        id="createBatch",
        tag="Batches",
        summary="Answer a file of requests when there is room",
        request=BatchRequest,
        example={"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        answer=BatchObject,
        errors=(*_BODY, *_ID, 429, 507),
    ),
    Operation(
        method="GET",
        path="/v1/batches",
        id="listBatches",
        tag="Batches",
        summary="Batches, the newest first",
        query={"limit": _limit(100, 20), "after": _AFTER},
        answer=BatchList,
        errors=(400,),
    ),
    Operation(
        method="GET",
        path="/v1/batches/{batch_id}",
        id="getBatch",
        tag="Batches",
        summary="A batch as it is now",
        answer=BatchObject,
        errors=_ID,
    ),
    Operation(
        method="POST",
        path="/v1/batches/{batch_id}/cancel",
        id="cancelBatch",
        tag="Batches",
        summary="Begin no further line of a batch, and drop those under way",
        answer=BatchObject,
        errors=(*_ID, 409),
    ),
    Operation(
        method="GET",
        path="/health",
        id="getHealth",
        tag="Server",
        summary="Whether the model is loaded and the engine lives",
        answer=Health,
        errors=(503,),
        access="open",
    ),
    Operation(
        method="GET",
        path="/version",
        id="getVersion",
        tag="Server",
        summary="The version of vlmserve",
        answer=Version,
        access="open",
    ),
    Operation(
        method="GET",
        path="/metrics",
        id="getMetrics",
        tag="Server",
        summary="Figures for Prometheus",
        answer="text/plain",
        access="monitor",
    ),
    Operation(
        method="GET",
        path="/server_info",
        id="getServerInfo",
        tag="Operators",
        summary="Version, model, settings, sizes, and what is going on",
        answer=ServerState,
        errors=_ENGINE,
        access="admin",
    ),
    Operation(
        method="POST",
        path="/flush_cache",
        id="flushCache",
        tag="Operators",
        summary="Forget the cached prefixes that no request uses",
        answer=FlushedCache,
        errors=(409, *_ENGINE),
        conflict=CacheInUse,
        access="admin",
    ),
    Operation(
        method="POST",
        path="/pause_generation",
        id="pauseGeneration",
        tag="Operators",
        summary="Begin no further step",
        answer=PauseState,
        errors=(409, *_ENGINE),
        access="admin",
    ),
    Operation(
        method="POST",
        path="/continue_generation",
        id="continueGeneration",
        tag="Operators",
        summary="End the pause",
        answer=PauseState,
        errors=(409, *_ENGINE),
        access="admin",
    ),
    Operation(
        method="POST",
        path="/abort_request",
        id="abortRequest",
        tag="Operators",
        summary="End a request, or all",
        request=AbortBody,
        example={"abort_all": True},
        answer=AbortedRequests,
        errors=(*_BODY, *_ID, *_ENGINE),
        access="admin",
    ),
    Operation(
        method="POST",
        path="/start_profile",
        id="startProfile",
        tag="Operators",
        summary="Record steps with torch's profiler",
        request=ProfileBody,
        example={"num_steps": 10},
        needs_body=False,
        answer=ProfileTrace,
        errors=(*_BODY, 409, *_ENGINE),
        access="admin",
    ),
    Operation(
        method="POST",
        path="/stop_profile",
        id="stopProfile",
        tag="Operators",
        summary="End the recording; answers when the trace is written",
        answer=ProfileTrace,
        errors=(409, *_ENGINE),
        access="admin",
    ),
)
