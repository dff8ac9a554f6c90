"""The Files API: by hand, and by the official client over real sockets."""

from __future__ import annotations

import asyncio
import base64
import errno
import http.client
import io
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import openai
import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import WAIT_S, Served, http_scope, official_client, png_url, real_server, serving
from tests.vlmserve.own_stores import own_stores
from tests.vlmserve.server_process import await_that
from vlmserve.api.app import build_app
from vlmserve.api.file_store import FileStore, Upload
from vlmserve.api.stores.contents import FolderContents
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings

SMALL = ServerSettings(engine=EngineArgs(model=""), max_file_bytes=1000, max_file_store_bytes=1000, max_files=10)
PNG = base64.b64decode(png_url().split(",")[1])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def served(checkpoint_folder, store) -> Iterator[Served]:
    limits = {"max_file_bytes": 300_000, "max_files": 6, "max_file_store_bytes": 500_000}
    with serving(checkpoint_folder, file_store_dir=str(store), **limits) as served:
        yield served


def upload(client, data=PNG, name="x.png", **fields):
    return client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "vision", **fields})


def refused(response, status, code, param=None):
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    return error["message"]


# ---------------------------------------------------------------- the official client


def test_the_official_client(ai, store):
    file = ai.files.create(file=("größe.png", PNG), purpose="vision")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(PNG), "größe.png", "vision", "file")
    assert (file.status, file.expires_at) == ("processed", None)
    assert ai.files.retrieve(file.id) == file
    answer = ai.files.content(file.id)
    assert answer.read() == PNG
    assert answer.response.headers["content-type"] == "application/octet-stream"
    assert answer.response.headers["content-disposition"] == "attachment; filename*=UTF-8''gr%C3%B6%C3%9Fe.png"
    assert [found.id for found in ai.files.list()] == [file.id]
    assert ai.files.delete(file.id).deleted
    assert list(ai.files.list()) == []
    assert list(store.glob("file-*")) == []
    with pytest.raises(openai.NotFoundError) as caught:
        ai.files.retrieve(file.id)
    assert caught.value.code == "file_not_found"


def test_the_official_client_uploads_from_disk_and_with_an_expiry(ai):
    path = Path(__file__)
    file = ai.files.create(file=path, purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    assert ai.files.content(file.id).read() == path.read_bytes()


def test_the_official_client_goes_through_pages(ai):
    files = [ai.files.create(file=(f"{n}", b"x"), purpose="user_data" if n % 2 else "vision") for n in range(5)]
    ids = [file.id for file in files]
    assert [file.id for file in ai.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in ai.files.list(limit=2, order="asc")] == ids
    assert [file.id for file in ai.files.list(purpose="user_data")] == [ids[3], ids[1]]
    page = ai.files.list(limit=2, after=ids[3])
    assert [file.id for file in page.data] == [ids[2], ids[1]]
    assert page.has_more
    assert not ai.files.list(limit=1, after=ids[1]).has_more


def test_the_official_client_learns_that_a_file_is_too_large(ai, store):
    """The server says so before it has read all; the client still gets to see it."""
    for size in (300_001, 20_000_000):
        with pytest.raises(openai.APIStatusError) as caught:
            ai.files.create(file=("x", bytes(size)), purpose="vision")
        assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
        assert "larger than 300000 bytes (setting --max-file-bytes)" in caught.value.message
    assert list(store.glob("file-*")) == []
    assert ai.files.create(file=("x", bytes(300_000)), purpose="vision").bytes == 300_000


# ---------------------------------------------------------------- by hand


def test_no_files_at_all(serve, store):
    _, client = serve(file_store_dir=str(store), max_files=0)
    with client:
        assert "the limit is 0 (setting --max-files)" in refused(upload(client), 400, "too_many_files")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": "x" * 2000}, "purpose"),
        ({"extra": "1"}, "extra"),
        ({"purpose": ["vision", "vision"]}, "purpose"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e9"}, "expires_after[seconds]"),
    ],
)
def test_fields_that_are_refused(client, store, fields, param):
    refused(upload(client, **fields), 400, "invalid_value", param)
    assert list(store.glob("file-*")) == []


def test_forms_that_are_refused(client, store):
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
    end = b"--b--\r\n"

    def post(content, kind="multipart/form-data; boundary=b"):
        return client.post("/v1/files", content=content, headers={"Content-Type": kind})

    refused(post(b'{"file": "x"}', "application/json"), 400, "invalid_form")
    refused(post(head, "multipart/form-data"), 400, "invalid_form")
    for broken in (b"nonsense", b"", head + file):
        refused(post(broken), 400, "invalid_form")
    long = file.replace(b'"x"', b'"' + b"x" * 1500 + b'"')
    twice = head + file + b"\r\n" + file
    for form, param in ((head, "file"), (file, "purpose"), (twice, "file"), (head + long, "file")):
        refused(post(form.removesuffix(b"\r\n") + b"\r\n" + end), 400, "invalid_value", param)
    assert list(store.glob("file-*")) == []
    whole = post(file + b"\r\n" + head + end)
    assert whole.status_code == 200, "a file may come before its purpose"
    assert client.get(f"/v1/files/{whole.json()['id']}/content").content == b"abc"


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=10001", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_lists_that_are_refused(client, query, param):
    refused(client.get(f"/v1/files?{query}"), 400, "invalid_value", param)


@pytest.mark.parametrize("name", ["x", "..%2f..%2fetc%2fpasswd", "file-" + "0" * 32])
def test_names_that_are_none(client, name):
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        assert client.request(method, f"/v1/files/{name}{path}").status_code == 404


def test_a_body_that_never_ends(client, store):
    """Chunked, and more of it behind the form's end: all bytes count."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n--b--\r\n'
    rest = (bytes(50_000) for _ in range(1000))
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    refused(client.post("/v1/files", content=chain([head], rest), headers=headers), 413, "file_too_large", "file")
    assert list(store.glob("file-*")) == []


def test_a_client_that_leaves_within_an_upload_leaves_nothing(port, store):
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 299000\r\n"
        b"Content-Type: multipart/form-data; boundary=b"
    )
    part = b'\r\n\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as link:
        link.sendall(head + part + bytes(280_000))
    await_that(lambda: not list(store.glob("file-*")), WAIT_S)


def test_an_upload_that_stalls_is_dropped(serve, store):
    served, _ = serve(file_store_dir=str(store), body_timeout_s=0.5, max_files=2)
    with real_server(served.app) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as link:
        head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
        link.sendall(head + b"Content-Length: 1000\r\n\r\n" + form)
        with official_client(port) as ai:
            kept = ai.files.create(file=("y", PNG), purpose="vision")
            answer = b"".join(iter(lambda: link.recv(65536), b""))  # up to the server's closing the connection
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close\r\n" in answer.lower()
            assert b"nothing more of the request's body came for 0.5 s (setting --body-timeout-s)" in answer
            assert b'"code":"body_timeout"' in answer
            assert {path.stem for path in store.glob("file-*")} == {kept.id}
            assert ai.files.content(kept.id).read() == PNG
            assert ai.files.create(file=("z", PNG), purpose="vision").bytes == len(PNG), "its place is free again"


def test_a_slow_upload_may_take_longer_than_the_limit(serve, store):
    """50 seconds by a fake clock before each of its parts, where 60 without one are too many."""
    served, _ = serve(file_store_dir=str(store), body_timeout_s=60, min_body_bytes_per_s=0)
    fields = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    parts = iter([fields, head, *[b"x"] * 10, b"\r\n--b--\r\n"])
    scope = http_scope("/v1/files", [(b"content-type", b"multipart/form-data; boundary=b")])
    sent = []

    async def scenario():
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now

        async def receive():
            nonlocal now
            now += 50
            await asyncio.sleep(0)  # what is due happens
            part = next(parts, None)
            return {"type": "http.request", "body": part or b"", "more_body": part is not None}

        async def send(message):
            sent.append(message)

        await served.app(scope, receive, send)

    asyncio.run(scenario())
    assert sent[0]["status"] == 200, sent
    assert [path.read_bytes() for path in store.glob("*.bin")] == [b"x" * 10]


def test_memory_holds_a_part_of_an_upload_only(serve, store, monkeypatch):
    """What is handed to the form at a time is bounded, however the file comes."""
    from vlmserve.api import files

    sizes = []
    feed = files.UploadForm.feed
    monkeypatch.setattr(files.UploadForm, "feed", lambda self, data: (sizes.append(len(data)), feed(self, data))[1])
    served, _ = serve(file_store_dir=str(store))
    with real_server(served.app) as port:
        with official_client(port) as ai:
            file = ai.files.create(file=("x", io.BytesIO(bytes(8_000_000))), purpose="vision")
        assert file.bytes == 8_000_000
    assert max(sizes) < 1_000_000


class WatchedLock:
    """Tells of everyone who comes for it, before they wait."""

    def __init__(self):
        self.lock = threading.Lock()
        self.came = threading.Semaphore(0)

    def __enter__(self):
        self.came.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


@pytest.mark.parametrize("path", ["", "/file-" + "0" * 32])
def test_the_event_loop_does_not_wait_for_the_store(served, tmp_path, path):
    with ExitStack() as stack:
        stores = own_stores(tmp_path, stack)
        files = FileStore(stores, SMALL)
        stack.callback(files.close)
        watched = files._database._lock = WatchedLock()
        app = build_app(served.frontend.manager, "m", SMALL, stores, files, stack)
        port = stack.enter_context(real_server(app))
        waiting, other = (http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S) for _ in range(2))
        with watched.lock:
            waiting.request("GET", "/v1/files" + path)
            assert watched.came.acquire(timeout=WAIT_S)
            other.request("GET", "/version")
            assert other.getresponse().status == 200
        assert waiting.getresponse().status == (404 if path else 200)
        for link in (waiting, other):
            link.close()


def test_without_a_folder_files_go_with_the_server(checkpoint_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with serving(checkpoint_folder) as served, TestClient(served.app) as client:
        assert upload(client).status_code == 200
        assert len(list(tmp_path.glob("vlmserve-files-*/files/file-*"))) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["begin", "write", "commit", "describe"])
def test_a_full_disk(client, store, monkeypatch, where, number):
    """At whichever step; what was written is gone, and its place is free again."""

    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    places = {"begin": (FolderContents, "create"), "write": (Upload, "write"), "commit": (FolderContents, "settle")}
    with monkeypatch.context() as patch:
        patch.setattr(*places.get(where, (FileStore, "commit")), full)
        for _ in range(7):  # one more than there may be files
            reply = upload(client, b"x" * 500)
            assert reply.status_code == 507
            error = reply.json()["error"]
            assert (error["code"], error["type"]) == ("storage_full", "server_error")
            assert os.strerror(number) in error["message"]
            assert "--file-store-dir" in error["message"]
    assert list(store.glob("file-*")) == []
    assert upload(client, b"x" * 500).status_code == 200


def test_a_disk_that_is_full_when_the_rest_is_written(tmp_path):
    """The kernel says so when the buffer is emptied, at the end."""
    with ExitStack() as stack:
        files = FileStore(own_stores(tmp_path, stack), SMALL)
        stack.callback(files.close)
        part = files.begin("owner")
        part.write(b"x" * 500)
        os.dup2(full := os.open("/dev/full", os.O_WRONLY), part._file.fileno())
        os.close(full)
        with pytest.raises(OSError, match="No space"):
            part.commit(filename="x", purpose="vision")
        part.close()
        assert (files.bytes, list(tmp_path.glob("file-*"))) == (0, [])
