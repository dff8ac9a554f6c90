"""OpenAI's Files API: uploads that chat requests name by their ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, BinaryIO
from urllib.parse import quote

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from vlmserve.api.auth import owner_of
from vlmserve.api.body import body_parts
from vlmserve.api.database import NO_SPACE
from vlmserve.api.file_store import FileRecord, FileStore, Upload
from vlmserve.api.upload_form import UploadForm
from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError, EngineError

PURPOSES = ("vision", "user_data", "batch")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_CHUNK_BYTES = 2**18
# What a form may have around its file.
_FORM_BYTES = 2**16
# OpenAI's limits of both.
_LIST_LIMIT = 10_000
EXPIRY_S = (3600, 30 * 24 * 3600)


class FilesApi:
    """The routes under /v1/files. What is found belongs to the API key that asks. settings: how slow uploads may be."""

    def __init__(self, store: FileStore, settings: ServerSettings) -> None:
        self._store = store
        self._settings = settings

    def add_routes(self, app: FastAPI) -> None:
        """Register them."""
        app.add_api_route("/v1/files", self.create, methods=["POST"])
        app.add_api_route("/v1/files", self.list, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.retrieve, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.delete, methods=["DELETE"])
        app.add_api_route("/v1/files/{file_id}/content", self.content, methods=["GET"])

    async def create(self, request: Request) -> Response:
        """Store an upload. Whatever goes wrong, or if the client leaves, nothing of it stays."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self._store.check_size(int(declared) - _FORM_BYTES)
        try:
            upload = await asyncio.to_thread(self._store.begin, owner_of(request))
            try:
                record = await self._receive(request, upload)
            finally:
                await asyncio.to_thread(upload.close)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise _no_space(error) from error
            raise EngineError(f"the file could not be stored: {error.strerror}") from error
        return JSONResponse(_describe(record))

    async def list(self, request: Request) -> Response:
        """A page of the caller's files, the newest first unless order=asc."""
        query = request.query_params
        limit, order = query.get("limit", str(_LIST_LIMIT)), query.get("order", "desc")
        if not (limit.isdecimal() and 1 <= int(limit) <= _LIST_LIMIT):
            raise _invalid("limit", limit, f"between 1 and {_LIST_LIMIT}")
        if order not in ("asc", "desc"):
            raise _invalid("order", order, "asc or desc")
        records = await asyncio.to_thread(self._store.files, owner_of(request))
        if order == "desc":
            records.reverse()
        if "purpose" in query:
            records = [record for record in records if record.purpose == query["purpose"]]
        if "after" in query:
            places = [place for place, record in enumerate(records) if record.id == query["after"]]
            if not places:
                raise _invalid("after", query["after"], "the id of a file in the list")
            records = records[places[0] + 1 :]
        page = [_describe(record) for record in records[: int(limit)]]
        ids = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return JSONResponse({"object": "list", "data": page, **ids, "has_more": len(page) < len(records)})

    async def retrieve(self, request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return JSONResponse(_describe(await asyncio.to_thread(self._store.find, owner_of(request), file_id)))

    async def delete(self, request: Request, file_id: str) -> Response:
        """Forget a file. Requests that read it already go on."""
        await asyncio.to_thread(self._store.delete, owner_of(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request, file_id: str) -> Response:
        """A file's bytes, for saving: browsers shall not take them for a page of ours."""
        record, file = await asyncio.to_thread(self._store.open, owner_of(request), file_id)
        headers = {
            "Content-Length": str(record.bytes),
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(_chunks(file), media_type="application/octet-stream", headers=headers)

    async def _receive(self, request: Request, upload: Upload) -> FileRecord:
        form = UploadForm(request.headers.get("content-type", ""), _FIELDS, upload.write)
        waiting: list[bytes] = []
        size = total = 0
        async for part in body_parts(request, self._settings):
            waiting.append(part)
            size += len(part)
            total += len(part)
            self._store.check_size(total - _FORM_BYTES)
            if size >= _CHUNK_BYTES:
                await asyncio.to_thread(form.feed, b"".join(waiting))
                waiting, size = [], 0
        await asyncio.to_thread(form.feed, b"".join(waiting))
        form.finish()
        purpose, expire_after_s = _check_fields(form.fields)
        assert form.filename is not None
        return await asyncio.to_thread(
            upload.commit, filename=form.filename, purpose=purpose, expire_after_s=expire_after_s
        )


def _check_fields(fields: dict[str, str]) -> tuple[str, int | None]:
    """The purpose, and the seconds until the file expires."""
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        raise _invalid("purpose", purpose, " or ".join(PURPOSES))
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, None
    if anchor != "created_at":
        raise _invalid("expires_after[anchor]", anchor, "created_at")
    least, most = EXPIRY_S
    if seconds is None or not seconds.isdecimal() or not least <= int(seconds) <= most:
        raise _invalid("expires_after[seconds]", seconds, f"between {least} and {most}")
    return purpose, int(seconds)


def _describe(record: FileRecord) -> dict[str, Any]:
    """OpenAI's file object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk


def _no_space(error: OSError) -> BadRequestError:
    message = f"the file could not be stored: {error.strerror} in the server's folder (setting --file-store-dir)"
    return BadRequestError(message, param="file", code="storage_full", status=507)


def _invalid(param: str, value: str | None, allowed: str) -> BadRequestError:
    shown = "missing" if value is None else repr(value[:80])
    return BadRequestError(f"{param} is {shown}; it must be {allowed}", param=param, code="invalid_value")
