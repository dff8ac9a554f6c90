"""JSONL: items with fields, and chat requests."""

from __future__ import annotations

import gzip
import itertools
import json
import os

import pytest

from tests.processors.clips import make_clip
from tests.vlmserve.commands.batch.inputs.found import ids, media, opened, requests, total, touch, unreadable
from tests.vlmserve.commands.warmup.media import data_url, png
from vlmserve.commands.batch.inputs import Columns
from vlmserve.commands.batch.item import ChatRequest, MediumItem
from vlmserve_common.errors import BadRequestError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "in/pics/a.png", png(1))
    touch(tmp_path / "in/clip.mp4", make_clip(4))
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
    assert [item.read() for item in items] == [expected] * 3
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
