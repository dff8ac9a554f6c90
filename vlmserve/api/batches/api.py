"""OpenAI's Batch API: files of requests that are answered when there is room."""

from __future__ import annotations

import re
import time
from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from vlmserve.api.batches.journal import Batch, BatchJournal, BatchList, BatchObject
from vlmserve.api.batches.runner import BatchRunner
from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of, owner_of
from vlmserve.api.file_store import FileStore
from vlmserve.api.openapi import BODY_ERRORS, KEPT_ERRORS, operation
from vlmserve.api.pages import page_of, page_query
from vlmserve.api.request_id import new_id
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.json_bodies import invalid_value
from vlmserve.frontend.openai.protocol import Metadata, StrictModel
from vlmserve_common.errors import BadRequestError

_LIST_LIMIT = 100
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
PURPOSE = "batch"


class OutputExpiresAfter(StrictModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86400)]


class BatchRequest(StrictModel):
    """POST /v1/batches. completion_window: 24h as in OpenAI's API, or another time in minutes, hours or days."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score"]
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}[mhd]$")]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchesApi:
    """The endpoints under /v1/batches. A batch belongs to the API key that made it."""

    def __init__(self, journal: BatchJournal, runner: BatchRunner, files: FileStore, settings: ServerSettings) -> None:
        self._journal = journal
        self._runner = runner
        self._files = files
        self._settings = settings

    @operation(
        *("POST", "/v1/batches", "createBatch", "Batches"),
        request=BatchRequest,
        example={"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        answer=BatchObject,
        errors=(*BODY_ERRORS, *KEPT_ERRORS, 429, 507),
    )
    async def create(self, request: Request) -> Response:
        """Answer a file of requests when there is room. Its lines are looked at when the batch begins."""
        body, caller = await read_body(request, BatchRequest, self._settings), caller_of(request)
        try:
            file = await self._files.threads.run(self._files.find, caller.owner, body.input_file_id)
        except BadRequestError as error:
            error.param = "input_file_id"
            raise
        if file.purpose != PURPOSE:
            what = f"the file {file.id} has the purpose {file.purpose!r}; input files are uploaded with {PURPOSE!r}"
            raise invalid_value("input_file_id", what)
        now, kept = int(time.time()), body.output_expires_after
        batch = Batch(
            id=new_id("batch").replace("-", "_"),
            owner=caller.owner,
            client=caller.client,
            tenant=caller.tenant,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            metadata=body.metadata or {},
            created_at=now,
            expires_at=now + _seconds(body.completion_window),
            output_expires_after_s=None if kept is None else kept.seconds,
        )
        total, shared = self._settings.max_batches, self._files.shared
        await self._journal.threads.run(self._journal.add, batch, total, shared=shared)
        self._runner.run(batch)
        return JSONResponse(await self._shown(batch))

    @operation("GET", "/v1/batches/{batch_id}", "getBatch", "Batches", answer=BatchObject, errors=KEPT_ERRORS)
    async def retrieve(self, request: Request, batch_id: str) -> Response:
        """Describe a batch as it is now."""
        return JSONResponse(await self._shown(await self._find(request, batch_id)))

    @operation(
        *("POST", "/v1/batches/{batch_id}/cancel", "cancelBatch", "Batches"),
        answer=BatchObject,
        errors=(*KEPT_ERRORS, 409),
    )
    async def cancel(self, request: Request, batch_id: str) -> Response:
        """Begin no further line of a batch, and drop those under way."""
        batch = await self._find(request, batch_id)
        if batch.has_ended:
            what = f"the batch {batch_id} is {batch.status}: there is nothing to cancel"
            raise BadRequestError(what, code="batch_ended", status=409)
        return JSONResponse(await self._shown(await self._runner.cancel(batch)))

    @operation(
        *("GET", "/v1/batches", "listBatches", "Batches"),
        query=page_query(_LIST_LIMIT, 20),
        answer=BatchList,
        errors=(400, 503),
    )
    async def list(self, request: Request) -> Response:
        """List batches, the newest first."""
        journal = self._journal
        found = list(map(self._runner.seen, await journal.threads.run(journal.batches, owner_of(request))))
        batches, page = page_of(request.query_params, found[::-1], lambda batch: batch.id, most=_LIST_LIMIT, usual=20)
        return JSONResponse(page | {"data": [await self._shown(batch) for batch in batches]})

    async def _find(self, request: Request, batch_id: str) -> Batch:
        journal = self._journal
        return self._runner.seen(await journal.threads.run(journal.find, owner_of(request), batch_id))

    async def _shown(self, batch: Batch) -> BatchObject:
        completed, failed = batch.completed, batch.failed
        if not batch.has_ended:
            completed, failed = await self._journal.threads.run(self._journal.counts, batch.id)
        return batch.as_json(completed=completed, failed=failed)


def _seconds(window: str) -> int:
    match = re.fullmatch(r"(\d+)([mhd])", window)
    assert match is not None
    return int(match[1]) * _UNIT_S[match[2]]
