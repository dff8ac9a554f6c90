"""A multipart/form-data body with one file, taken apart as it arrives. The file is passed on, never held."""

from __future__ import annotations

from collections.abc import Callable, Collection

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from processors.formats import words
from vlmserve_common.errors import BadRequestError

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
