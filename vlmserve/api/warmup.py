"""POST /v1/warmup: media are encoded ahead of time, for chat requests to come."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from fastapi import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import ServedModel, while_connected
from vlmserve.frontend.openai.protocol import WarmupRequest
from vlmserve.frontend.tokenizer_manager import WarmupInput
from vlmserve.ipc.messages import EncodedItem
from vlmserve_common.errors import BadRequestError


class WarmedMedium(TypedDict):
    """An encoded picture or video. found, encoded: temporal patches found in the cache, and encoded now; a picture has
    one. saved: all of them are on disk."""

    type: Literal["image", "video"]
    temporal_patches: int
    found: int
    encoded: int
    patches_encoded: int
    saved: bool | None


class Warmup(TypedDict):
    id: str
    object: Literal["warmup"]
    items: list[WarmedMedium]


@operation(
    *("POST", "/v1/warmup", "createWarmup", "Answers"),
    request=WarmupRequest,
    example={"messages": [{"role": "user", "content": "Hello"}]},
    answer=Warmup,
    errors=MODEL_ERRORS,
)
async def warm_up(served: ServedModel, request: Request) -> Response:
    """Encode media ahead of time. The answer comes when everything is encoded. Raises the errors of `errors`."""
    body = await read_body(request, WarmupRequest, served.settings)
    adapter = served.adapter_of(body.model)
    if body.pin and served.settings.engine.embedding_cache_dir is None:
        raise BadRequestError(
            "there is nothing to pin: the server keeps no embeddings on disk (setting --embedding-cache-dir)",
            param="pin",
            code="no_embedding_cache",
        )
    caller = caller_of(request)
    wanted = WarmupInput(
        request_id=name_answer(request, "warmup"),
        messages=body.messages,  # type: ignore[arg-type]  # kept as the client wrote them
        find_file=served.files.for_owner(caller.owner),
        mm_processor_kwargs=body.mm_processor_kwargs or {},
        pin=bool(body.pin),
        client=caller.client,
        tenant=caller.tenant,
        adapter=None if adapter is None else adapter.ref,
    )
    items = await while_connected(request.receive, served.manager.warm_up(wanted))
    answer = {"id": wanted.request_id, "object": "warmup", "items": [_describe(item) for item in items]}
    return JSONResponse(answer)


def _describe(item: EncodedItem) -> dict[str, Any]:
    counts = asdict(item)
    return {"type": counts.pop("modality").value, "found": item.found, **counts}
