"""POST /v1/warmup: media are encoded ahead of time, for chat requests to come."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from vlmserve.messages import EncodedItem
from vlmserve.server.auth import client_of, owner_of
from vlmserve.server.body import BodyLimits, read_body
from vlmserve.server.chat import check_model
from vlmserve.server.errors import JsonResponse
from vlmserve.server.file_store import FileStore
from vlmserve.server.protocol import WarmupRequest
from vlmserve.server.streaming import while_connected
from vlmserve.tokenizer.tokenizer_manager import TokenizerManager, WarmupInput
from vlmserve_common.errors import BadRequestError


class WarmupEndpoint:
    """can_pin: whether embeddings are kept on disk."""

    def __init__(
        self,
        manager: TokenizerManager,
        model_names: Sequence[str],
        files: FileStore,
        *,
        body_limits: BodyLimits,
        can_pin: bool,
    ) -> None:
        self._manager = manager
        self._model_names = tuple(model_names)
        self._files = files
        self._body_limits = body_limits
        self._can_pin = can_pin

    async def __call__(self, request: Request) -> Response:
        """The answer, when everything is encoded. Raises what `errors` describes."""
        body = await read_body(request, WarmupRequest, self._body_limits)
        if body.model is not None:
            check_model(body.model, self._model_names)
        if body.pin and not self._can_pin:
            raise BadRequestError(
                "there is nothing to pin: the server keeps no embeddings on disk (setting --embedding-cache-dir)",
                param="pin",
                code="no_embedding_cache",
            )
        wanted = WarmupInput(
            request_id=f"warmup-{uuid.uuid4().hex}",
            messages=body.messages,  # type: ignore[arg-type]  # kept as the client wrote them
            find_file=self._files.for_owner(owner_of(request)),
            mm_processor_kwargs=body.mm_processor_kwargs or {},
            pin=bool(body.pin),
            client=client_of(request),
        )
        items = await while_connected(request.receive, self._manager.warm_up(wanted))
        answer = {"id": wanted.request_id, "object": "warmup", "items": [_describe(item) for item in items]}
        return JsonResponse(answer, headers={"X-Request-Id": wanted.request_id})


def _describe(item: EncodedItem) -> dict[str, Any]:
    return {
        "type": item.modality.value,
        "temporal_patches": item.temporal_patches,
        "encoded": item.encoded,
        "found": item.found,
        "patches_encoded": item.patches_encoded,
        "saved": item.saved,
    }
