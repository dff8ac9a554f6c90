"""A server of embeddings that knows colours: a picture's vector is its mean colour, and a text's the colour that it
names."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

_COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}


class FakeEmbedder:
    """asked: texts that came. pictures: their sizes. answers: None for vectors; else status and body. held: requests
    wait until it is set. given: the headers of the last request."""

    def __init__(self) -> None:
        self.url = ""
        self.model = "colours"
        self.asked: list[str] = []
        self.pictures: list[tuple[int, int]] = []
        self.answers: tuple[int, bytes] | None = None
        self.held: threading.Event | None = None
        self.arrived = threading.Event()
        self.given: dict[str, str] = {}

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"object": "list", "data": [{"id": self.model}]}).encode()
        assert path == "/v1/embeddings"
        assert body["model"] == self.model
        self.arrived.set()
        if self.held is not None:
            self.held.wait(20)
        if self.answers is not None:
            return self.answers
        content = body["messages"][-1]["content"]
        if isinstance(content, str):
            self.asked.append(content)
            vector = np.array(next(rgb for name, rgb in _COLOURS.items() if name in content), "<f4")
        else:
            file = base64.b64decode(content[0]["image_url"]["url"].partition(",")[2])
            picture = Image.open(io.BytesIO(file))
            assert picture.format == "JPEG"
            self.pictures.append(picture.size)
            vector = np.asarray(picture).mean((0, 1)).astype("<f4") + 1
        encoded = base64.b64encode(vector.tobytes()).decode()
        return 200, json.dumps({"data": [{"embedding": encoded}]}).encode()


@contextlib.contextmanager
def fake_embedder() -> Iterator[FakeEmbedder]:
    embedder = FakeEmbedder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            embedder.given = dict(self.headers)
            status, data = embedder.answer(self.path, body)
            with contextlib.suppress(OSError):  # the client left
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    embedder.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield embedder
    finally:
        if embedder.held is not None:
            embedder.held.set()
        server.shutdown()
        server.server_close()
