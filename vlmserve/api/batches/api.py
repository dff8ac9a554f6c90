"""OpenAI's Batch API: files of requests that are answered when there is room."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from vlmserve.api.auth import client_of, owner_of, tenant_of
from vlmserve.api.batches.journal import BatchJournal
from vlmserve.api.batches.record import Batch
from vlmserve.api.batches.runner import BatchRunner
from vlmserve.api.body import read_body
from vlmserve.api.file_store import FileStore
from vlmserve.api.protocol import StrictModel
from vlmserve.api.request_id import new_id
from vlmserve.config.settings import ServerSettings
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
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/score"]
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}[mhd]$")]
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchesApi:
    """The routes under /v1/batches. What is found belongs to the API key that asks."""

    def __init__(self, journal: BatchJournal, runner: BatchRunner, files: FileStore, settings: ServerSettings) -> None:
        self._journal = journal
        self._runner = runner
        self._files = files
        self._settings = settings

    def add_routes(self, app: FastAPI) -> None:
        """Register them."""
        app.add_api_route("/v1/batches", self.create, methods=["POST"])
        app.add_api_route("/v1/batches", self.list, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}", self.retrieve, methods=["GET"])
        app.add_api_route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"])

    async def create(self, request: Request) -> Response:
        """Take a batch; its lines are looked at when it begins."""
        body, owner = await read_body(request, BatchRequest, self._settings), owner_of(request)
        try:
            file = await asyncio.to_thread(self._files.find, owner, body.input_file_id)
        except BadRequestError as error:
            error.param = "input_file_id"
            raise
        if file.purpose != PURPOSE:
            what = f"the file {file.id} has the purpose {file.purpose!r}; input files are uploaded with {PURPOSE!r}"
            raise BadRequestError(what, param="input_file_id", code="invalid_value")
        now, kept = int(time.time()), body.output_expires_after
        batch = Batch(
            id=new_id("batch").replace("-", "_"),
            owner=owner,
            client=client_of(request),
            tenant=tenant_of(request),
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            metadata=body.metadata or {},
            created_at=now,
            expires_at=now + _seconds(body.completion_window),
            output_expires_after_s=None if kept is None else kept.seconds,
        )
        await asyncio.to_thread(self._journal.add, batch, self._settings.max_batches)
        self._runner.run(batch)
        return JSONResponse(await self._shown(batch))

    async def retrieve(self, request: Request, batch_id: str) -> Response:
        """A batch as it is now."""
        return JSONResponse(await self._shown(await self._find(request, batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """Begin no further line of it, and drop those under way."""
        batch = await self._find(request, batch_id)
        if batch.has_ended:
            what = f"the batch {batch_id} is {batch.status}: there is nothing to cancel"
            raise BadRequestError(what, code="batch_ended", status=409)
        return JSONResponse(await self._shown(await self._runner.cancel(batch)))

    async def list(self, request: Request) -> Response:
        """A page of the caller's batches, the newest first."""
        query = request.query_params
        limit = query.get("limit", "20")
        if not (limit.isdecimal() and 1 <= int(limit) <= _LIST_LIMIT):
            what = f"limit is {limit!r}; it must be between 1 and {_LIST_LIMIT}"
            raise BadRequestError(what, param="limit", code="invalid_value")
        found = await asyncio.to_thread(self._journal.batches, owner_of(request))
        if "after" in query:
            places = [place for place, batch in enumerate(found) if batch.id == query["after"]]
            if not places:
                what = f"after is {query['after'][:80]!r}; it must be the id of a batch in the list"
                raise BadRequestError(what, param="after", code="invalid_value")
            found = found[places[0] + 1 :]
        page = [await self._shown(batch) for batch in found[: int(limit)]]
        ids = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ids, "has_more": len(page) < len(found)})

    async def _find(self, request: Request, batch_id: str) -> Batch:
        return await asyncio.to_thread(self._journal.find, owner_of(request), batch_id)

    async def _shown(self, batch: Batch) -> dict[str, Any]:
        completed, failed = batch.completed, batch.failed
        if not batch.has_ended:
            completed, failed = await asyncio.to_thread(self._journal.counts, batch.id)
        return batch.as_json(completed=completed, failed=failed)


def _seconds(window: str) -> int:
    match = re.fullmatch(r"(\d+)([mhd])", window)
    assert match is not None
    return int(match[1]) * _UNIT_S[match[2]]
