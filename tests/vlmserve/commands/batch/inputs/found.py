"""Inputs opened as the command does, and what comes of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from processors.fetch.fetching import BlockingFetcher
from processors.fetch.limits import FetchSettings
from tests.vlmserve.api.fake_engine import real_server
from vlmserve.commands.batch.inputs import Columns, InputFormat, Inputs, open_inputs
from vlmserve.commands.batch.item import Failed, Found, MediumItem, RequestItem

FETCHER = BlockingFetcher(FetchSettings(allowed_local_media_path="/", max_bytes=100_000, max_video_bytes=200_000))


def opened(
    *words: object,
    stdin: bytes = b"",
    columns: Columns | None = None,
    input_format: InputFormat | None = None,
    fetcher: BlockingFetcher = FETCHER,
) -> Inputs:
    return open_inputs(
        [str(word) for word in words],
        fetcher=fetcher,
        stdin=io.BytesIO(stdin),
        columns=columns,
        input_format=input_format,
    )


def ids(inputs: Inputs) -> list[str]:
    return [found.id for found in inputs]


def media(inputs: Inputs) -> dict[str, MediumItem]:
    """By id; all must be media, and no two ids alike."""
    found = list(inputs)
    assert all(isinstance(one, MediumItem) for one in found), found
    by_id = {one.id: one for one in found}
    assert len(by_id) == len(found)
    return by_id


def requests(inputs: Inputs) -> list[RequestItem]:
    found = list(inputs)
    assert all(isinstance(one, RequestItem) for one in found), found
    return found


def unreadable(found: Iterator[Found] | Inputs) -> list[Failed]:
    return [one for one in found if isinstance(one, Failed)]


def total(inputs: Inputs) -> int | None:
    """What counting ahead ends with."""
    return list(inputs.count())[-1]


def touch(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@contextlib.contextmanager
def web(folder: Path, *, parts: bool = True) -> Iterator[str]:
    """Serves the files of a folder; the URL of that. parts: parts of files, too."""

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await Response((folder / scope["path"].lstrip("/")).read_bytes())(scope, receive, send)

    with real_server(StaticFiles(directory=folder) if parts else whole) as port:
        yield f"http://127.0.0.1:{port}"
