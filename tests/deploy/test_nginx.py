"""deploy/nginx.conf in a real nginx, before a real server with the built-in model."""

from __future__ import annotations

import base64
import http.client
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vlmserve.server_process import PATIENCE_S, ROOT, ServerProcess

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="there is no nginx on PATH or in /usr/sbin (Debian: apt install nginx)"),
]
CONF = ROOT / "deploy" / "nginx.conf"
TLS = ROOT / "tests" / "processors" / "tls"
# What stands around the example on a real machine, without a need for root.
AROUND = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr notice;
events {{}}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/vlmserve.conf;
}}
"""


class Proxy:
    """A running nginx, reached over a socket in its folder."""

    def __init__(self, folder: Path, server_port: int) -> None:
        self._https = folder / "https.socket"
        self.accesses = folder / "access.log"
        conf = CONF.read_text(encoding="utf-8")
        for old, new in (
            ("server 127.0.0.1:8000;", f"server 127.0.0.1:{server_port};"),
            ("listen 80;", f"listen unix:{folder}/http.socket;"),
            ("listen 443 ssl;", f"listen unix:{self._https} ssl;"),
            ("/etc/ssl/vlm.example.com/fullchain.pem", f"{TLS}/media.example.cert.pem"),
            ("/etc/ssl/vlm.example.com/privkey.pem", f"{TLS}/media.example.key.pem"),
            ("/var/log/nginx/vlmserve.log", str(self.accesses)),
        ):
            assert conf.count(old) == 1, old
            conf = conf.replace(old, new)
        (folder / "vlmserve.conf").write_text(conf, encoding="utf-8")
        (folder / "nginx.conf").write_text(AROUND.format(folder=folder), encoding="utf-8")
        assert NGINX is not None
        words = [NGINX, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        started = []
        for line in self._process.stderr:
            started.append(line)
            if "OS: " in line:  # said once it listens
                return
        raise AssertionError("".join(started))

    def connect(self) -> http.client.HTTPConnection:
        trusting = ssl.create_default_context(cafile=TLS / "media.example.cert.pem")
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(PATIENCE_S)
        plain.connect(str(self._https))
        connection = http.client.HTTPConnection("media.example")
        connection.sock = trusting.wrap_socket(plain, server_hostname="media.example")
        return connection

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = self.connect()
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = [sys.executable, "-m", "vlmserve.cli", "serve", "--port", "0", "--num-threads", "1"]
    words += ["--allowed-hosts", "media.example"]
    server = ServerProcess(words, tmp_path_factory.mktemp("serve") / "run")
    yield server
    server.end()


@pytest.fixture(scope="module")
def proxy(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path_factory.mktemp("nginx"), server.port())
    yield proxy
    proxy.end()


def _question(picture: bytes | None = None, **more: Any) -> bytes:
    content: list[dict[str, Any]] = [{"type": "text", "text": "Describe the picture."}]
    if picture is not None:
        url = "data:image/png;base64," + base64.b64encode(picture).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    request = {"model": "vlmserve-default", "messages": [{"role": "user", "content": content}], **more}
    return json.dumps(request).encode()


def _figure(server: ServerProcess, name: str) -> float:
    """The sum of a metric's samples, asked of the server itself."""
    _, text = server.get("metrics")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"vlmserve:{name}"))


def _picture_of(size: int) -> bytes:
    """A PNG file of about that many bytes: what comes behind its end mark is passed over."""
    picture = (ROOT / "assets" / "samples" / "shapes.png").read_bytes()
    return picture + os.urandom(size - len(picture))


def test_an_answer_comes_while_it_is_made_and_ends_with_its_client(server: ServerProcess, proxy: Proxy) -> None:
    finished = _figure(server, "request_success_total")
    connection = proxy.connect()
    body = _question(stream=True, max_tokens=3000, ignore_eos=True, temperature=0)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    for _ in range(10):
        line = response.readline()
        assert line.startswith(b"data: {"), line
        assert response.readline() == b"\n"
    assert _figure(server, "num_requests_running") == 1
    assert _figure(server, "request_success_total") == finished
    # nginx hangs up on the server when the client does on it, so nothing is computed for nobody
    response.close()
    connection.close()
    while _figure(server, "num_requests_running"):
        pass  # each look is a request to the server; the test's own time limit ends it
    assert _figure(server, 'request_success_total{finished_reason="abort"') == 1


class _Teller(http.server.BaseHTTPRequestHandler):
    """Answers with two events, the second once `heard` is set. Unlike our server it does not ask to be unbuffered."""

    protocol_version = "HTTP/1.1"
    heard = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in (b"data: 1\n\n", b"data: 2\n\n"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.heard.wait(PATIENCE_S)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *words: object) -> None:
        pass


def test_nothing_is_kept_back(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Teller) as upstream:
        threading.Thread(target=upstream.serve_forever).start()
        proxy = Proxy(tmp_path, upstream.server_port)
        try:
            connection = proxy.connect()
            connection.request("GET", "/v1/events")
            response = connection.getresponse()
            assert response.readline() == b"data: 1\n"
            _Teller.heard.set()
            assert response.read() == b"\ndata: 2\n\n"
            connection.close()
        finally:
            _Teller.heard.set()
            proxy.end()
            upstream.shutdown()


def test_a_large_picture_passes_and_the_answer_names_its_id(proxy: Proxy) -> None:
    body = _question(_picture_of(40 * 2**20), max_tokens=8)
    response, text = proxy.ask("POST", "/v1/chat/completions", body, **{"Content-Type": "application/json"})
    assert response.status == 200, text
    answer = json.loads(text)
    assert answer["choices"][0]["message"]["content"]
    assert response.headers["X-Request-Id"] == answer["id"]
    logged = rf'"POST /v1/chat/completions HTTP/1.1" 200 .* {answer["id"]}$'
    while not re.search(logged, proxy.accesses.read_text(), re.M):
        pass  # nginx logs a request when it is done with it, after the answer; the test's own time limit ends this


def test_what_is_too_large_is_refused_in_the_servers_words(proxy: Proxy) -> None:
    body = b'{"padding": "' + b"x" * 64 * 2**20 + b'"}'
    response, text = proxy.ask("POST", "/v1/chat/completions", body, **{"Content-Type": "application/json"})
    assert response.status == 413
    assert "--max-body-mib" in json.loads(text)["error"]["message"]


def test_uploads_may_be_larger_than_requests(proxy: Proxy) -> None:
    edge = "an-edge-of-the-form"
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'.encode(),
        f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'.encode(),
        _picture_of(100 * 2**20),
        f"\r\n--{edge}--\r\n".encode(),
    ]
    kind = f"multipart/form-data; boundary={edge}"
    response, text = proxy.ask("POST", "/v1/files", b"".join(parts), **{"Content-Type": kind})
    assert response.status == 200, text
    assert json.loads(text)["bytes"] == 100 * 2**20


@pytest.mark.parametrize("path", ["/metrics", "/version", "/docs", "/openapi.json", "/"])
def test_what_is_for_the_inside_stays_there(server: ServerProcess, proxy: Proxy, path: str) -> None:
    assert proxy.ask("GET", path)[0].status == 404


def test_health_and_models_are_public(proxy: Proxy) -> None:
    assert proxy.ask("GET", "/health")[0].status == 200
    assert json.loads(proxy.ask("GET", "/v1/models")[1])["data"][0]["id"] == "vlmserve-default"
