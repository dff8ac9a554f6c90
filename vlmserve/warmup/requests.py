"""From a source to the request that brings it, its files read; and before they are, what identifies them.

Everything is read here, also what a server is to encode: so kinds, limits and identities are told in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from processors.fetch.fetching import MediaFetcher
from processors.inputs import Modality
from vlmserve.client.chat_files import Message, modality_within_limit, named_files, with_data_urls, with_files
from vlmserve.client.media_names import local_path
from vlmserve.server.body import checked, json_object
from vlmserve.server.protocol import WarmupRequest
from vlmserve.warmup.sources import Medium, RequestLine, Source
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupBody:
    """messages: in the API's form, files as bytes in parts of Qwen's form ({"type": "image", "image": bytes})."""

    messages: Sequence[Message]
    mm_processor_kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedSource:
    """identity: another one if anything about the source or its files has changed. read: reads the files, blocking;
    raises BadRequestError."""

    identity: str
    read: Callable[[], WarmupBody]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    identity: str
    read: Callable[[], bytes]


class SourceReader:
    """Thread-safe, blocking. fetcher: may read any local file, for the user has named it."""

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher

    def open(self, source: Source) -> OpenedSource:
        """Find out what a source is: files are only looked at, while http(s) URLs are fetched. BadRequestError."""
        return self._open_medium(source) if isinstance(source, Medium) else self._open_request(source)

    def _open_medium(self, medium: Medium) -> OpenedSource:
        content = self._content(medium.address, Path(), None)

        def read() -> WarmupBody:
            data = content.read()
            modality = modality_within_limit(data, self._fetcher)
            part = {"type": modality.value, modality.value: data}
            return WarmupBody(messages=[{"role": "user", "content": [part]}], mm_processor_kwargs={})

        return OpenedSource(identity=content.identity, read=read)

    def _open_request(self, line: RequestLine) -> OpenedSource:
        with line.manifest.open("rb") as file:
            file.seek(line.offset)
            text = file.readline()
        sent, kwargs = _parse(text)
        contents: dict[tuple[str, Modality], _Content] = {}
        for param, address, modality in named_files(sent):
            try:
                contents[address, modality] = self._content(address, line.manifest.parent, modality)
            except BadRequestError as error:
                error.param = param
                raise
        digest = blake3.blake3(text.strip())
        for content in contents.values():
            digest.update(b"\0" + content.identity.encode())

        def read() -> WarmupBody:
            files = {key: content.read() for key, content in contents.items()}
            return WarmupBody(messages=with_files(sent, files), mm_processor_kwargs=kwargs)

        return OpenedSource(identity=f"request {digest.hexdigest()}", read=read)

    def _content(self, address: str, folder: Path, modality: Modality | None) -> _Content:
        """modality: None if it is not known yet."""
        path = local_path(address, folder)
        limit = modality or Modality.VIDEO
        if path is None and not address.startswith("data:"):
            data = self._fetcher.fetch(address, modality=limit)
            return _Content(identity=f"bytes {blake3.blake3(data).hexdigest()}", read=lambda: data)
        if path is None:
            identity, url = f"url {blake3.blake3(address.encode()).hexdigest()}", address
        else:
            identity, url = _file_identity(path), path.absolute().as_uri()
        return _Content(identity=identity, read=lambda: self._fetcher.fetch(url, modality=limit))


def server_request(body: WarmupBody) -> dict[str, Any]:
    """A body for a server: JSON, files as data: URLs."""
    request: dict[str, Any] = {"messages": with_data_urls(body.messages)}
    if body.mm_processor_kwargs:
        request["mm_processor_kwargs"] = body.mm_processor_kwargs
    return request


def _parse(text: bytes) -> tuple[Sequence[Message], Mapping[str, Any]]:
    given = json_object(text, "line")
    wanted = ("messages", "mm_processor_kwargs")
    raw = {name: value for name, value in given.items() if name in wanted}
    checked(raw, WarmupRequest)
    return raw["messages"], raw.get("mm_processor_kwargs") or {}


def _file_identity(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        raise BadRequestError(f"cannot read {str(path)!r}: {error.strerror}", code="invalid_media_url") from None
    return f"file {path.absolute()} {status.st_size} {status.st_mtime_ns}"
