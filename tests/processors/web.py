"""A web server on 127.0.0.1 that behaves well or badly on demand."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

TLS = Path(__file__).parent / "tls"  # made for media.example, trusted by nobody but the tests
BODY = b"some bytes of a picture"
ANSWERS = {
    "/good": (200, BODY, {}),
    "/empty": (200, b"", {}),
    "/error": (500, b"oops", {}),
    "/no_content": (204, b"", {}),
    "/nowhere": (302, b"", {}),
    "/zipped": (200, b"\x1f\x8b", {"Content_Encoding": "gzip"}),
    "/short": (200, b"half", {"Content_Length": "8"}),
}


class Server(http.server.ThreadingHTTPServer):
    """Counts requests; `release` ends handlers that stall."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.server_names: list[str | None] = []
        self.stalled = threading.Event()
        self.release = threading.Event()
        self.gone = threading.Event()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what is tested."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.headers.append(dict(self.headers))
        path, _, query = self.path.partition("?")
        answer = getattr(self, "get_" + path.strip("/"), None)
        if path in ANSWERS:
            status, body, headers = ANSWERS[path]
            self.answer(status, body, **headers)
            self.close_connection = path == "/short"
        elif answer is None:
            self.answer(404, b"no such thing")
        else:
            answer(query)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def get_to(self, query: str) -> None:
        self.answer(302, Location=query)

    def get_hops(self, query: str) -> None:
        self.answer(307, Location=f"/hops?{int(query) - 1}" if int(query) > 1 else "/good")

    def get_size(self, query: str) -> None:
        self.answer(200, bytes(int(query)))

    def get_claims(self, query: str) -> None:
        self.answer(200, b"x", Content_Length=query)
        self.stall()

    def get_endless(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.release.is_set():
            self.wfile.write(bytes(65536))

    def get_drip(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.release.wait(0.01):
            self.wfile.write(b"x")

    def get_drip_headers(self, _: str) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not self.server.release.wait(0.01):
            self.wfile.write(b"x")

    def get_stall(self, _: str) -> None:
        self.stall()

    def get_until_gone(self, _: str) -> None:
        self.server.stalled.set()
        if not self.connection.recv(1):
            self.server.gone.set()
        self.close_connection = True

    def get_garbage(self, _: str) -> None:
        self.wfile.write(b"\0\1\2 this is not HTTP\r\n\r\n")
        self.close_connection = True

    def stall(self) -> None:
        self.server.stalled.set()
        self.server.release.wait()
        self.close_connection = True


@contextlib.contextmanager
def serve(tls: bool = False) -> Iterator[Server]:
    server = Server()
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "media.example.cert.pem", TLS / "media.example.key.pem")
        context.sni_callback = lambda _sock, name, _context: server.server_names.append(name)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
