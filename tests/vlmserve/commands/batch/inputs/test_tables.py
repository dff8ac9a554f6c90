"""Parquet: pictures in and beside it, few rows at a time."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.vlmserve.commands.batch.inputs.found import ids, media, opened, total, touch, unreadable
from tests.vlmserve.commands.warmup.media import data_url, png
from vlmserve.commands.batch.inputs import Columns
from vlmserve.commands.batch.item import MediumItem


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "in/pics/a.png", png(1))
    return tmp_path


def write(columns: dict, name: str = "in/t.parquet", **options: object) -> str:
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
    name = write({"n": [1, 2], "Image": values})
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
    name = write(
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
    items = list(media(opened(write({"image": [png(1), png(2)], "text": text, "day": days, "time": times}))).values())
    assert [item.fields["text"] for item in items] == [None, "x"]
    assert [item.fields["day"] for item in items] == [None, "1970-01-01T00:00:00"]
    json.dumps(items[0].fields)


def test_rows_and_tables_without_a_picture():
    name = write({"image": [png(1), None, png(2)]})
    found = list(opened(name))
    assert [type(one) is MediumItem for one in found] == [True, False, True]
    assert (found[1].id, found[1].message) == (
        f"{name}#1",
        "image is nothing; it must be a path, a URL or a file's bytes",
    )
    name = write({"a": [1], "b": [2]})
    (one,) = unreadable(opened(name, "in/pics"))
    assert one.message == "no column of pictures or videos is known among a, b: name it with --media-column"
    (one,) = unreadable(opened(name, columns=Columns(media="b")))
    assert one.message == "b is a value of type int; it must be a path, a URL or a file's bytes"


def test_damaged_files(here):
    whole = write({"image": [png(seed) for seed in range(40)], "n": list(range(40))}, row_group_size=10)
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
    name = write(
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
