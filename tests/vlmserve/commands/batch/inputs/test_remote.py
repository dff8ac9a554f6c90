"""What is elsewhere: folders and files by fsspec, and larger files by http."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.test_floors import BLOCK
from tests.vlmserve.commands.batch.inputs.found import ids, media, opened, requests, total, touch, unreadable, web
from tests.vlmserve.commands.batch.inputs.test_tars import tar
from tests.vlmserve.commands.warmup.media import png
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

TAR = tar({"a.png": png(1), "a.txt": b"one", "b.png": png(2)})
ITEMS = [{"image": "pics/a.png"}, {"image": "/pics/a.png", "id": "x"}, {"image": "file:///etc/passwd", "id": "y"}]


def table() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"image": [png(1), png(2)], "n": [1, 2]}), file)
    return file.getvalue()


FILES = {
    "pics/a.png": png(1),
    "pics/deep/b.JPG": png(2),
    "pics/a.txt": b"one",
    "pics/.hidden/c.png": png(3),
    "big.png": png(1) + bytes(200_000),
    "text.png": b"no picture",
    "s-0.tar": TAR,
    "s-1.tar.gz": gzip.compress(TAR),
    "cut.tar": TAR[:900],
    "cut.tgz": gzip.compress(TAR)[:-30],
    "t.parquet": table(),
    "items.jsonl": "\n".join(map(json.dumps, ITEMS)).encode(),
    "list.txt": b"pics/a.png\nhttp://127.0.0.1:1/x.png\nftp://127.0.0.1/x.png\nzip://a.png::memory://b.zip\n",
}


@pytest.fixture
def memory():
    """memory://box, with everything in it."""
    system = fsspec.filesystem("memory")
    for name, data in FILES.items():
        system.pipe(f"/box/{name}", data)
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in FILES.items():
        touch(tmp_path / name, data)
    return tmp_path


def test_a_folder(memory):
    inputs = opened("memory://box/pics")
    assert total(inputs) is None
    items = media(inputs)
    assert list(items) == ["memory://box/pics/a.png", "memory://box/pics/deep/b.JPG"] == ids(inputs)
    assert [item.read() for item in items.values()] == [png(1), png(2)]
    item = items["memory://box/pics/deep/b.JPG"]
    assert item.fields == {"id": item.id, "name": "b.JPG", "stem": "b", "folder": "deep"}
    assert (item.path, item.root, item.size) == (None, None, len(png(2)))
    memory.pipe("/box/pics/a.png", png(5))
    again = media(inputs)
    assert again["memory://box/pics/a.png"].signature != items["memory://box/pics/a.png"].signature
    assert again[item.id].signature == item.signature


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("memory://box/pics/*.png", ["pics/a.png"]),
        ("memory://box/**/*.JPG", ["pics/deep/b.JPG"]),
        ("memory://box/*/*", ["pics/a.png"]),
        ("memory://box/pics/**", ["pics/a.png", "pics/deep/b.JPG"]),
        ("memory://box/pics/a.*", ["pics/a.png"]),
        ("memory://box/s-*.tar", ["s-0.tar/a", "s-0.tar/b"]),
        ("memory://box/pics/a.png", ["pics/a.png"]),
        ("memory://*/pics/a.png", ["pics/a.png"]),
        ("memory://box/s-{0..0}.tar", ["s-0.tar/a", "s-0.tar/b"]),
    ],
)
def test_patterns_and_files(memory, pattern, expected):
    assert ids(opened(pattern)) == [f"memory://box/{name}" for name in expected]


def test_chains(here):
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.writestr("d/a.png", png(1))
        archive.writestr("b.png", png(2))
        archive.writestr("b.txt", "no")
    items = media(opened(f"zip://::{here}/z.zip"))
    assert [item.read() for item in items.values()] == [png(2), png(1)]
    assert list(items) == [f"zip://b.png::{here}/z.zip", f"zip://d/a.png::{here}/z.zip"]
    assert ids(opened(f"zip://d/*.png::{here}/z.zip")) == [f"zip://d/a.png::{here}/z.zip"]
    assert ids(opened(f"zip://*.png::{here}/z.zip")) == [f"zip://b.png::{here}/z.zip"]


def test_files_with_many_items(memory):
    base = "memory://box"
    words = [f"{base}/{name}" for name in ("s-0.tar", "s-1.tar.gz", "t.parquet")]
    items = media(opened(*words))
    assert list(items) == [
        *(f"{base}/{name}/{key}" for name in ("s-0.tar", "s-1.tar.gz") for key in "ab"),
        f"{base}/t.parquet#0",
        f"{base}/t.parquet#1",
    ]
    assert [item.read() for item in items.values()] == [png(1), png(2)] * 3
    assert items[f"{base}/s-0.tar/a"].fields["txt"] == "one"
    signatures = [item.signature for item in items.values()]
    assert signatures == [item.signature for item in media(opened(*words)).values()]


def test_what_files_elsewhere_may_name(memory):
    base = "memory://box"
    *items, refused = opened(f"{base}/items.jsonl")
    assert [item.id for item in items] == [f"{base}/items.jsonl:1", "x"]
    assert [item.read() for item in items] == [png(1)] * 2
    assert (refused.id, refused.code) == (f"{base}/items.jsonl:3", "invalid_media_url")
    assert refused.message == "'file:///etc/passwd': a file that came by memory cannot name local files"
    listed = list(opened(f"{base}/list.txt"))
    assert [item.id for item in listed][:2] == [f"{base}/pics/a.png", "http://127.0.0.1:1/x.png"]
    assert listed[0].read() == png(1)
    for item in listed[2:]:
        with pytest.raises(BadRequestError, match="files may name http, https, data and s3"):
            item.read()
    parts = [{"type": "image", "image": "pics/a.png"}]
    memory.pipe("/box/chat.jsonl", json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    (request,) = requests(opened(f"{base}/chat.jsonl"))
    assert request.read().messages[0]["content"] == [{"type": "image", "image": png(1)}]


def test_trouble_with_files(memory):
    big, text = media(opened("memory://box/*.png")).values()
    with pytest.raises(BadRequestError, match="more than 200000 bytes"):
        big.read()
    with pytest.raises(BadRequestError, match="neither a picture nor a video"):
        text.read()
    memory.rm("/box/text.png")
    with pytest.raises(BadRequestError, match="there is no such file or folder"):
        text.read()
    found = list(opened("memory://box/cut.tar", "memory://box/cut.tgz"))
    assert [one.code for one in unreadable(found)] == ["cut_off", "cut_off"]


def test_folders_that_cannot_be_read_and_others(memory, monkeypatch):
    ls, asked = MemoryFileSystem.ls, []

    def refuses(self, path, detail=True, **more):
        asked.append(path)
        if path == "/box/pics":
            raise RuntimeError("no credentials")
        return ls(self, path, detail=detail, **more)

    monkeypatch.setattr(MemoryFileSystem, "ls", refuses)
    memory.pipe("/box/z/z.png", png(1))
    found = iter(opened("memory://box"))
    assert next(found).id == "memory://box/big.png"
    assert asked == ["/box"], "folders are opened when it is their turn"
    pics, text, last = found
    assert text.id == "memory://box/text.png"
    assert (pics.id, pics.message) == ("memory://box/pics", "cannot read the folder: no credentials")
    assert last.id == "memory://box/z/z.png"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("memory://box/none", "there is no such file or folder"),
        ("memory://box/none.tar", "there is no such file or folder"),
        ("nosuch://x", "Protocol not known: nosuch"),
        ("s3://bucket/x", "'s3://bucket/x': Install s3fs"),
        ("gs://bucket/x.tar", "'gs://bucket/x.tar': Please install gcsfs"),
    ],
)
def test_words_that_stand_for_nothing(memory, word, message):
    with pytest.raises(SettingsError, match=message):
        opened(word)


@pytest.mark.parametrize(
    ("missing", "word", "message"),
    [
        ("fsspec", "s3://bucket/x", r"needs fsspec: \S* -m pip install .*\[caption\]"),
        ("pyarrow", "t.parquet", r"needs pyarrow: \S* -m pip install .*\[caption\]"),
        ("aiohttp", "http://127.0.0.1:1/s.tar", r"needs aiohttp: \S* -m pip install .*\[caption\]"),
    ],
)
def test_packages_that_are_missing(here, monkeypatch, missing, word, message):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=message):
        opened(word)


def test_what_needs_no_packages(here):
    code = """
import io
from processors.fetch.fetching import BlockingFetcher
from processors.fetch.limits import FetchSettings
from vlmserve.commands.batch.inputs import open_inputs
fetcher = BlockingFetcher(FetchSettings(allowed_local_media_path="/"))
words = ["s-0.tar", "s-1.tar.gz", "list.txt", "items.jsonl", "pics", "pics/*.png", "-"]
print(len(list(open_inputs(words, fetcher=fetcher, stdin=io.BytesIO(b"big.png")))))
"""
    blocked = {"aiohttp", "fsspec", "pyarrow", "rich"}
    code = BLOCK.format(blocked=blocked) + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "15\n", done.stderr


def test_files_by_http(here):
    with web(here) as base:
        words = [f"{base}/{name}" for name in ("s-{0..0}.tar", "s-1.tar.gz?x=1", "t.parquet")]
        items = media(opened(*words))
        assert [item.read() for item in items.values()] == [png(1), png(2)] * 3
        assert next(iter(items)) == f"{base}/s-0.tar/a"
        found = list(opened(f"{base}/items.jsonl", f"{base}/list.txt", f"{base}/cut.tgz"))
        assert found[0].signature == found[1].signature == f"{base}/pics/a.png"
        assert found[3].id == f"{base}/pics/a.png"
        assert [one.code for one in unreadable(found)] == ["invalid_media_url", "cut_off"]
        with pytest.raises(SettingsError, match="there is no such file"):
            opened(f"{base}/none.tar")


@pytest.mark.parametrize("parts", [True, False])
def test_large_files_by_http(here, parts):
    data = tar({f"{number}.png": png(number) + bytes(90_000) for number in range(80)})
    touch(here / "large.tar", data)
    with web(here, parts=parts) as base:
        items = media(opened(f"{base}/large.tar"))
        assert len(items) == 80
        assert items[f"{base}/large.tar/79"].read() == png(79) + bytes(90_000)
        found = list(opened(f"{base}/t.parquet"))
        if parts:
            assert len(found) == 2
        else:
            assert "sends no parts of files, so it must be downloaded first" in found[0].message
