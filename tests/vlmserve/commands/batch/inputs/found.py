"""Inputs opened as the command does, and what comes of them."""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from processors.fetch.fetching import BlockingFetcher
from processors.fetch.limits import FetchSettings
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


class _NoParts(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


class _Parts(_NoParts):
    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        part = data[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {wanted[1]}-{int(wanted[1]) + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up as they like."""


@contextlib.contextmanager
def web(folder: Path, *, parts: bool = True) -> Iterator[str]:
    """Serves the files of a folder; the URL of that. parts: parts of files, too."""
    handler = functools.partial(_Parts if parts else _NoParts, directory=str(folder))
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
