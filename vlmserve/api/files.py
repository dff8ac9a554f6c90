"""OpenAI's Files API: uploads that chat requests name by their ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import quote

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.responses import JSONResponse, Response, StreamingResponse
from typing_extensions import TypedDict

from processors.formats import words
from vlmserve.api.body import body_parts
from vlmserve.api.callers import owner_of
from vlmserve.api.file_store import FileRecord, FileStore, Upload
from vlmserve.api.openapi import BODY_ERRORS, KEPT_ERRORS, operation
from vlmserve.api.pages import Page, page_of, page_query
from vlmserve.api.stores.rows import NO_SPACE
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.json_bodies import invalid_value
from vlmserve_common.errors import BadRequestError, EngineError

PURPOSES = ("vision", "user_data", "batch")
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_CHUNK_BYTES = 2**19
# What a form may have around its file.
_FORM_BYTES = 2**16
# OpenAI's limits of both.
_LIST_LIMIT = 10_000
EXPIRY_S = (3600, 30 * 24 * 3600)
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


class FileObject(TypedDict):
    """An uploaded file. Times are Unix seconds. bytes: its size."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(Page):
    data: list[FileObject]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


class FilesApi:
    """The endpoints under /v1/files. A file belongs to the API key that uploaded it."""

    def __init__(self, store: FileStore, settings: ServerSettings) -> None:
        self._store = store
        self._settings = settings

    @operation(
        *("POST", "/v1/files", "createFile", "Files"),
        form=_UPLOAD,
        answer=FileObject,
        errors=(*BODY_ERRORS, 429, 500, 503, 507),
    )
    async def create(self, request: Request) -> Response:
        """Upload a file. If anything goes wrong, or the client leaves, nothing of it stays."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self._store.check_size(int(declared) - _FORM_BYTES)
        try:
            upload = await self._store.threads.run(self._store.begin, owner_of(request))
            try:
                record = await self._receive(request, upload)
            finally:
                await self._store.threads.run(upload.close)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise _no_space(error) from error
            raise EngineError(f"the file could not be stored: {error.strerror}") from error
        return JSONResponse(_describe(record))

    @operation(
        *("GET", "/v1/files", "listFiles", "Files"),
        query=page_query(_LIST_LIMIT, _LIST_LIMIT) | {"purpose": {"type": "string"}},
        answer=FileList,
        errors=(400, 503),
    )
    async def list(self, request: Request) -> Response:
        """List uploaded files."""
        records = await self._store.threads.run(self._store.files, owner_of(request))
        query = request.query_params
        purpose = query.get("purpose")
        if purpose is not None:
            records = [record for record in records if record.purpose == purpose]
        records, page = page_of(query, records, lambda record: record.id, most=_LIST_LIMIT, usual=_LIST_LIMIT)
        return JSONResponse(page | {"data": [_describe(record) for record in records]})

    @operation("GET", "/v1/files/{file_id}", "getFile", "Files", answer=FileObject, errors=KEPT_ERRORS)
    async def retrieve(self, request: Request, file_id: str) -> Response:
        """Describe a file."""
        return JSONResponse(_describe(await self._store.threads.run(self._store.find, owner_of(request), file_id)))

    @operation("DELETE", "/v1/files/{file_id}", "deleteFile", "Files", answer=DeletedFile, errors=KEPT_ERRORS)
    async def delete(self, request: Request, file_id: str) -> Response:
        """Forget a file. Requests that read it already go on."""
        await self._store.threads.run(self._store.delete, owner_of(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @operation(
        *("GET", "/v1/files/{file_id}/content", "getFileContent", "Files"),
        answer="application/octet-stream",
        errors=KEPT_ERRORS,
    )
    async def content(self, request: Request, file_id: str) -> Response:
        """Return the bytes of a file. Browsers save them, and do not take them for a page of this server."""
        record, file = await self._store.threads.run(self._store.open, owner_of(request), file_id)
        headers = {
            "Content-Length": str(record.bytes),
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(self._chunks(file), media_type="application/octet-stream", headers=headers)

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
                await self._store.threads.run(form.feed, b"".join(waiting))
                waiting, size = [], 0
        await self._store.threads.run(form.feed, b"".join(waiting))
        form.finish()
        purpose, expire_after_s = _check_fields(form.fields)
        assert form.filename is not None
        return await self._store.threads.run(
            upload.commit, filename=form.filename, purpose=purpose, expire_after_s=expire_after_s
        )

    async def _chunks(self, file: BinaryIO) -> AsyncIterator[bytes]:
        with file:
            while chunk := await self._store.threads.run(file.read, _CHUNK_BYTES):
                yield chunk


def _check_fields(fields: dict[str, str]) -> tuple[str, int | None]:
    """Return the purpose, and the seconds until the file expires."""
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


def _describe(record: FileRecord) -> FileObject:
    same = {name: getattr(record, name) for name in FileObject.__annotations__ if hasattr(record, name)}
    return cast("FileObject", same | {"object": "file", "status": "processed"})


def _no_space(error: OSError) -> BadRequestError:
    message = f"the file could not be stored: {error.strerror} in the server's folder (setting --file-store-dir)"
    return BadRequestError(message, param="file", code="storage_full", status=507)


def _invalid(param: str, value: str | None, allowed: str) -> BadRequestError:
    shown = "missing" if value is None else repr(value[:80])
    return invalid_value(param, f"{param} is {shown}; it must be {allowed}")


_FILE = "file"
_MAX_FIELD_BYTES = 1024
_MAX_NAME_BYTES = 1024


class UploadForm:
    """Takes a body with `feed` and `finish`; then `filename` and `fields` are known.

    content_type: the request's header. known: the names of fields that may come beside "file". write: takes the file's
    bytes. All methods raise BadRequestError for a body that is malformed or has other fields.
    """

    def __init__(self, content_type: str, known: Collection[str], write: Callable[[bytes], None]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise BadRequestError(
                f"the request's Content-Type is {content_type[:80]!r}; it must be multipart/form-data with a boundary",
                code="invalid_form",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._known = known
        self._write = write
        self._header = [b"", b""]  # name and value of the one being read
        self._disposition = b""
        self._field: str | None = None  # the part being read
        self._value = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._open_part,
                    "on_part_data": lambda data, start, end: self._take(data[start:end]),
                    "on_part_end": self._end_part,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from None

    def finish(self) -> None:
        """Take the end of the body."""
        if self._parser.state != MultipartState.END:
            raise BadRequestError("the form is cut off: its last boundary is missing", code="invalid_form")
        if self.filename is None:
            raise BadRequestError("file is missing", param=_FILE, code="invalid_value")

    def _begin_part(self) -> None:
        self._disposition = self._value = b""
        self._field = None

    def _add_header(self, place: int, data: bytes) -> None:
        self._header[place] += data

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [b"", b""]

    def _open_part(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field == _FILE:
            if self.filename is not None:
                raise BadRequestError("the form has more than one file", param=_FILE, code="invalid_value")
            name = options.get(b"filename", b"file")
            if len(name) > _MAX_NAME_BYTES:
                what = f"the file's name has {len(name)} bytes, the limit is {_MAX_NAME_BYTES}"
                raise BadRequestError(what, param=_FILE, code="invalid_value")
            self.filename = name.decode("utf-8", "replace")
        elif field not in self._known:
            raise BadRequestError(f"{field[:80]!r} is not a known field", param=field[:80], code="invalid_value")
        elif field in self.fields:
            raise BadRequestError(f"{field} is given twice", param=field, code="invalid_value")
        self._field = field

    def _take(self, data: bytes) -> None:
        if self._field == _FILE:
            self._write(data)
            return
        self._value += data
        if len(self._value) > _MAX_FIELD_BYTES:
            what = f"{self._field} is longer than {_MAX_FIELD_BYTES} bytes"
            raise BadRequestError(what, param=self._field, code="invalid_value")

    def _end_part(self) -> None:
        if self._field is not None and self._field != _FILE:
            self.fields[self._field] = self._value.decode("utf-8", "replace")


def _malformed(error: FormParserError) -> BadRequestError:
    return BadRequestError(f"the form is malformed: {words(error)}", code="invalid_form")
