"""Lists of paths and URLs, and words that are URLs."""

from __future__ import annotations

import gzip
import io
import itertools
import tracemalloc

import pytest

from processors.fetch.fetching import BlockingFetcher
from processors.fetch.limits import FetchSettings
from tests.vlmserve.commands.batch.inputs.found import FETCHER, ids, media, opened, total, touch, unreadable, web
from tests.vlmserve.commands.warmup.media import data_url, png
from vlmserve.commands.batch.inputs import open_inputs, records
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

LIST = b"\xef\xbb\xbf# comment\r\npics/a.png\r\n\r\n  http://127.0.0.1:1/b.png?size=3  \n%s\nfile://%s\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "lists/pics/a.png", png(1))
    touch(tmp_path / "c.png", png(3))
    text = LIST % (data_url(png(2)).encode(), str(tmp_path / "c.png").encode())
    touch(tmp_path / "lists/list.txt", text)
    touch(tmp_path / "lists/packed.txt.gz", gzip.compress(text))
    return tmp_path


@pytest.mark.parametrize("name", ["list.txt", "packed.txt.gz"])
def test_a_list(here, name):
    inputs = opened(f"lists/{name}")
    items = media(inputs)
    assert total(inputs) == 4
    first, url, data, last = items
    assert (first, url, last) == ("lists/pics/a.png", "http://127.0.0.1:1/b.png?size=3", str(here / "c.png"))
    assert data.startswith("data:")
    assert len(data) == 37
    assert [items[id].read() for id in (first, data, last)] == [png(1), png(2), png(3)]
    assert items[url].fields["stem"] == "b"
    assert items[url].signature == url
    assert "name" not in items[data].fields


def test_a_list_on_standard_input(here):
    stdin = io.BytesIO(b"".join(b"%d.png\n" % number for number in range(9)))
    found = itertools.islice(open_inputs(["-"], fetcher=FETCHER, stdin=stdin), 3)
    assert [one.id for one in found] == ["0.png", "1.png", "2.png"]
    assert stdin.tell() == 3 * len(b"0.png\n"), "line by line"
    inputs = opened("-", stdin=b"c.png\nlists/pics/a.png\nnone.png\n")
    assert list(inputs.count()) == [None]
    assert ids(inputs) == ["c.png", "lists/pics/a.png", "none.png"]
    with pytest.raises(SettingsError, match="standard input was read already"):
        list(inputs)


def test_a_list_that_is_gone(here):
    inputs = opened("lists/packed.txt.gz", "c.png")
    (here / "lists/packed.txt.gz").unlink()
    gone, found = inputs
    assert (gone.message, found.id) == ("cannot read it: No such file or directory", "c.png")


def test_a_line_without_end(here, monkeypatch):
    monkeypatch.setattr(records, "MOST_BYTES", 100)
    touch(here / "long.txt", b"c.png\n" + b"x" * 5_000_000 + b"\nc.png\n")
    tracemalloc.start()
    try:
        found = list(opened("long.txt"))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert [one.id for one in found] == ["c.png", "long.txt:2", "c.png"]
    assert unreadable(found)[0].message == "the line has more than 100 bytes"


def test_urls(here):
    touch(here / "dir/a b.png", png(5))
    with web(here) as base:
        url = f"{base}/dir/a%20b.png?x=1"
        inputs = opened(url, data_url(png(6)), (here / "c.png").as_uri())
        assert total(inputs) == 3
        items = media(inputs)
        assert items[url].fields == {"id": url, "name": "a b.png", "stem": "a b", "folder": "dir"}
        with pytest.raises(BadRequestError, match="--allow-private-media"):
            items[url].read()
        fetcher = BlockingFetcher(FetchSettings(allow_private_media=True))
        assert media(opened(url, fetcher=fetcher))[url].read() == png(5)
        assert items[str(here / "c.png")].path == here / "c.png"
