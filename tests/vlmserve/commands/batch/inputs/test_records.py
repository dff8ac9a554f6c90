"""Files of records: lists of paths and URLs, words that are URLs, JSONL, and parquet, few rows at a time."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import itertools
import json
import os
import tracemalloc
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from processors.fetch.fetching import BlockingFetcher
from processors.fetch.limits import FetchSettings
from tests.processors.clips import make_clip
from tests.vlmserve.commands.batch.inputs.found import (
    FETCHER,
    ids,
    media,
    opened,
    requests,
    total,
    touch,
    unreadable,
    web,
)
from tests.vlmserve.commands.warmup.media import data_url, png
from vlmserve.commands.batch.inputs import Columns, open_inputs, records
from vlmserve.commands.batch.item import ChatRequest, MediumItem
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "in/pics/a.png", png(1))
    touch(tmp_path / "in/clip.mp4", make_clip(4))
    touch(tmp_path / "lists/pics/a.png", png(1))
    touch(tmp_path / "c.png", png(3))
    text = LIST % (data_url(png(2)).encode(), str(tmp_path / "c.png").encode())
    touch(tmp_path / "lists/list.txt", text)
    touch(tmp_path / "lists/packed.txt.gz", gzip.compress(text))
    return tmp_path


def write(here, *lines: object, name: str = "in/items.jsonl") -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    touch(here / name, gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return name


@pytest.mark.parametrize("name", ["in/items.jsonl", "in/items.ndjson", "in/items.jsonl.gz"])
def test_items(here, name):
    kwargs = {"max_pixels": 3136}
    write(
        here,
        {"image": "pics/a.png", "id": "first", "prompt": "What, {{ who }}?", "who": "Ann", "n": [1, {"x": None}]},
        "",
        {"video": "clip.mp4", "mm_processor_kwargs": kwargs},
        {"url": data_url(png(2)), "image": None, "id": 7},
        {"image_url": {"url": str(here / "in/pics/a.png")}, "name": "mine"},
        name=name,
    )
    inputs = opened(name)
    assert total(inputs) == 4
    items = list(media(inputs).values())
    assert [item.id for item in items] == ["first", f"{name}:3", "7", f"{name}:5"]
    builtin = {"name": "a.png", "stem": "a", "folder": "pics"}
    own = {"id": "first", "image": "pics/a.png", "who": "Ann", "n": [1, {"x": None}]}
    assert items[0].fields == {**builtin, **own}
    assert [item.prompt for item in items] == ["What, {{ who }}?", None, None, None]
    assert [item.options for item in items] == [{}, {"mm_processor_kwargs": kwargs}, {}, {}]
    assert [item.read() for item in items] == [png(1), make_clip(4), png(2), png(1)]
    assert items[2].fields == {"id": 7, "image": None}
    assert items[3].fields["name"] == "mine", "a field of the file's own goes before what is built in"
    assert items[0].path == (here / "in/pics/a.png").relative_to(here)
    assert ids(inputs) == [item.id for item in items]


def test_columns_that_are_named(here):
    name = write(here, {"image": "no", "src": "pics/a.png", "key": "k", "ask": "Why?", "prompt": "p", "id": 3})
    (item,) = opened(name, columns=Columns(media="src", id="key", prompt="ask"))
    assert (item.id, item.prompt, item.read()) == ("k", "Why?", png(1))
    assert (item.fields["prompt"], item.fields["id"]) == ("p", 3)
    (one,) = unreadable(opened(name, columns=Columns(media="other")))
    assert "'other' (--media-column)" in one.message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": NaN}', "not valid JSON"),
        ({"text": "hello"}, "names no medium, and has no messages"),
        ({"image": 3}, "image is a value of type int; it must be a path, a URL or a file's bytes"),
        ({"image": ""}, "image is a value of type str"),
        ({"image": "a.png", "prompt": 3}, "prompt is of type int; it must be text"),
        ({"image": "a.png", "id": [3]}, "id is of type list; it must be text"),
        ({"image": "a.png", "mm_processor_kwargs": 3}, "mm_processor_kwargs is of type int; it must be an object"),
        ({"custom_id": 3, "body": {}}, "custom_id is 3; it must be text"),
    ],
)
def test_lines_that_are_not_valid(here, line, message):
    name = write(here, {"image": "pics/a.png"}, line, {"image": "pics/a.png", "id": "x"})
    found = list(opened(name))
    (one,) = unreadable(found)
    assert message in one.message
    assert (one.id, one.code) == ("in/items.jsonl:2", "invalid_line")
    assert [other.id for other in found] == ["in/items.jsonl:1", one.id, "x"]


def chat(*parts: dict, **more: object) -> dict:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], **more}


PLACE = "messages[0].content[0]"


def test_chat_requests(here):
    picture = {"type": "image_url", "image_url": {"url": "pics/a.png", "detail": "low"}}
    inline = {"type": "image_url", "image_url": {"url": data_url(png(2))}}
    clip = {"type": "video", "video": (here / "in/clip.mp4").as_uri(), "nframes": 4}
    body = chat(picture, inline, clip, max_tokens=7, n=2)
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "model": "x"}}
    name = write(here, {**body, "stream": True}, batch, {**body, "id": "mine"})
    inputs = opened(name)
    assert total(inputs) == 3
    items = requests(inputs)
    assert [item.id for item in items] == [f"{name}:1", "b", "mine"]
    assert [item.is_batch for item in items] == [False, True, False]
    expected = ChatRequest(
        messages=chat(
            {"type": "image", "image": png(1), "detail": "low"},
            inline,
            {"type": "video", "video": make_clip(4), "nframes": 4},
        )["messages"],
        options={"max_tokens": 7, "n": 2},
    )
    assert [item.read() for item in items] == [expected, replace(expected, model="x"), expected]
    signatures = [item.signature for item in items]
    assert signatures == [item.signature for item in requests(inputs)]
    os.utime(here / "in/pics/a.png", ns=(1, 1))
    assert not set(signatures) & {item.signature for item in requests(inputs)}


@pytest.mark.parametrize(
    ("lines", "param", "message"),
    [
        *(
            ([body, {"custom_id": "b", "body": body}], param, message)
            for body, param, message in (
                (chat(max_tokens="7"), "max_tokens", "it must be a whole number"),
                (chat(max_tokns=7), "max_tokns", "max_tokns"),
                ({"messages": []}, "messages", "messages"),
                (chat({"type": "image_url", "image_url": {"url": "none.png"}}), PLACE, "No such file"),
                (chat({"type": "image", "image": "clip.mp4"}), PLACE, "limit is 100000"),
            )
        ),
        ([{"custom_id": "b", "body": chat(), "method": "GET"}], "method", "method"),
        ([{"custom_id": "b", "body": chat(), "url": "/v1/embeddings"}], "url", "url"),
        ([{"custom_id": "b", "body": "hello"}], "body", "body"),
    ],
)
def test_mistakes_in_requests_are_told_when_they_are_read(here, lines, param, message):
    touch(here / "in/clip.mp4", make_clip(4) + bytes(100_000))
    for item in requests(opened(write(here, *lines))):
        with pytest.raises(BadRequestError, match=message) as error:
            item.read()
        assert error.value.param == param


def test_a_file_that_is_cut_off(here):
    name = write(here, *[{"image": "pics/a.png", "x": number} for number in range(2000)], name="in/many.jsonl.gz")
    touch(here / name, (here / name).read_bytes()[:-100])
    *found, last = opened(name)
    assert len(found) > 1000
    assert all(isinstance(one, MediumItem) for one in found)
    assert (last.id, last.code) == (name, "cut_off")
    assert last.message.startswith(f"cut off after line {len(found)}: ")


def test_lines_are_pulled(here):
    """A line behind those that were asked for may still be written, and no file is opened before its line's turn."""
    name = write(here, *[{"image": f"{number}.png", "pad": "x" * 10_000} for number in range(100)])
    found = iter(opened(name))
    first = [one.id for one in itertools.islice(found, 3)]
    assert first == [f"{name}:{number}" for number in (1, 2, 3)]
    with open(here / name, "r+b") as file:
        file.truncate(500_000)
    assert 45 < sum(isinstance(one, MediumItem) for one in found) < 50


def test_standard_input_may_be_told_to_be_jsonl(here):
    line = json.dumps({"image": "in/pics/a.png", "id": "x"}).encode()
    assert media(opened("-", stdin=line, input_format="jsonl"))["x"].read() == png(1)


LIST = b"\xef\xbb\xbf# comment\r\npics/a.png\r\n\r\n  http://127.0.0.1:1/b.png?size=3  \n%s\nfile://%s\n"


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


def write_table(columns: dict, name: str = "in/t.parquet", **options: object) -> str:
    pq.write_table(pa.table(columns), name, **options)
    return name


@pytest.mark.parametrize(
    "values",
    [
        [png(1), png(2)],
        pa.array([png(1), png(2)], pa.large_binary()),
        [{"bytes": png(1), "path": "x/one.png"}, {"bytes": png(2), "path": None}],
        [{"bytes": None, "path": "pics/a.png"}, {"bytes": png(2), "path": "two.png"}],
        ["pics/a.png", data_url(png(2))],
        pa.array(["pics/a.png", data_url(png(2))]).dictionary_encode(),
    ],
    ids=["bytes", "large", "structs", "structs with paths", "addresses", "dictionary"],
)
def test_where_a_picture_may_be(values):
    name = write_table({"n": [1, 2], "Image": values})
    inputs = opened(name)
    assert total(inputs) == 2
    items = media(inputs)
    assert list(items) == [f"{name}#0", f"{name}#1"]
    assert [item.read() for item in items.values()] == [png(1), png(2)]
    assert [item.fields["n"] for item in items.values()] == [1, 2]
    assert not any(isinstance(value, bytes | dict) for item in items.values() for value in item.fields.values())
    assert len({item.signature for item in items.values()}) == 2


def test_fields_are_json():
    day = datetime.datetime(2024, 5, 17, 12, 30)
    name = write_table(
        {
            "jpg": [png(1)],
            "id": ["mine"],
            "day": [day],
            "price": [decimal.Decimal("1.50")],
            "nan": [float("nan")],
            "tags": [["a", "b"]],
            "box": [{"x": 1, "raw": b"\0"}],
            "thumb": [b"\xff"],
            "prompt": ["a cat"],
            "mask": pa.array([None], pa.binary()),
        }
    )
    (item,) = media(opened(name)).values()
    assert item.id == f"{name}#0"
    assert item.fields == {
        "id": "mine",
        "day": "2024-05-17T12:30:00",
        "price": "1.50",
        "nan": None,
        "tags": ["a", "b"],
        "box": {"x": 1},
        "prompt": "a cat",
        "mask": None,
    }
    assert item.prompt is None, "what a table calls so is seldom meant for us"
    (item,) = opened(name, columns=Columns(id="id", prompt="prompt", media="jpg"))
    assert (item.id, item.prompt) == ("mine", "a cat")


def test_values_that_python_cannot_have():
    text = pa.array([b"\xff", b"x"]).view(pa.string())
    days = pa.array([2**40, 0], pa.timestamp("s"))
    times = pa.array([1, 2], pa.timestamp("ns"))
    items = list(
        media(opened(write_table({"image": [png(1), png(2)], "text": text, "day": days, "time": times}))).values()
    )
    assert [item.fields["text"] for item in items] == [None, "x"]
    assert [item.fields["day"] for item in items] == [None, "1970-01-01T00:00:00"]
    json.dumps(items[0].fields)


def test_rows_and_tables_without_a_picture():
    name = write_table({"image": [png(1), None, png(2)]})
    found = list(opened(name))
    assert [type(one) is MediumItem for one in found] == [True, False, True]
    assert (found[1].id, found[1].message) == (
        f"{name}#1",
        "image is nothing; it must be a path, a URL or a file's bytes",
    )
    name = write_table({"a": [1], "b": [2]})
    (one,) = unreadable(opened(name, "in/pics"))
    assert one.message == "no column of pictures or videos is known among a, b: name it with --media-column"
    (one,) = unreadable(opened(name, columns=Columns(media="b")))
    assert one.message == "b is a value of type int; it must be a path, a URL or a file's bytes"


def test_damaged_tables(here):
    whole = write_table({"image": [png(seed) for seed in range(40)], "n": list(range(40))}, row_group_size=10)
    data = (here / whole).read_bytes()
    offset = pq.ParquetFile(whole).metadata.row_group(1).column(0).data_page_offset
    touch(here / "in/bad.parquet", data[:offset] + bytes(100) + data[offset + 100 :])
    touch(here / "in/cut.parquet", data[:-1000])
    touch(here / "in/none.parquet", b"")
    inputs = opened("in/none.parquet", "in/cut.parquet", "in/bad.parquet", whole)
    found = list(inputs)
    assert sum(isinstance(one, MediumItem) for one in found) == 70
    told = unreadable(found)
    assert [one.id for one in told] == ["in/none.parquet", "in/cut.parquet", "in/bad.parquet#10"]
    assert told[2].message.endswith("; 10 rows are passed over")
    assert total(inputs) == 80
    gone = opened(whole, "in/pics")
    (here / whole).unlink()
    assert [(one.id, one.message) for one in unreadable(gone)] == [(whole, "cannot read it: No such file or directory")]


def test_a_row_group_is_not_read_as_a_whole(here):
    """Of 64 MB in one row group, the first rows take a few."""
    picture = png(1) + bytes(2**20)
    name = write_table(
        {"image": [picture] * 64}, row_group_size=64, write_batch_size=1, use_dictionary=False, compression="none"
    )
    assert (here / name).stat().st_size > 64 * 2**20
    tracemalloc.start()
    try:
        assert len(list(itertools.islice(opened(name), 3))) == 3
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
    assert ids(opened(name))[-1] == f"{name}#63"
