"""Tars of samples: whole, damaged, and made to do harm."""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import json
import tarfile
from pathlib import Path

import pytest

from tests.processors.clips import make_clip
from tests.vlmserve.commands.batch.inputs.found import ids, media, opened, total, touch, unreadable
from tests.vlmserve.commands.warmup.media import png
from vlmserve.commands.batch.inputs import Columns, tars
from vlmserve.commands.batch.item import MediumItem
from vlmserve_common.errors import BadRequestError

SAMPLES = {
    "d/0001.png": png(1),
    "d/0001.json": json.dumps({"who": "Ann", "n": 1}).encode(),
    "d/0001.txt": b" a cat \n",
    "d/0001.cls": b"7",
    "d/0001.npy": b"\x93NUMPY\0",
    "d/0002.mp4": make_clip(4),
    "d/0003.left.png": png(3),
    "d/0003.right.PNG": png(4),
    "d/0003.meta.json": b'{"x": 1}',
    "README": b"hello",
    "d/._0004.png": b"what another system leaves",
    "d/0005.txt": b"alone",
    "d/0006.png": png(6),
}
IDS = ["d/0001", "d/0002", "d/0003.left.png", "d/0003.right.png", "d/0006"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tar(files: dict[str, bytes | tarfile.TarInfo], format: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, data in files.items():
            if isinstance(data, tarfile.TarInfo):
                archive.addfile(data)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def whole(here: Path, name: str = "s.tar") -> str:
    data = tar(SAMPLES)
    touch(here / name, data if name.endswith("tar") else gzip.compress(data))
    return name


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz", "s.tgz"])
def test_samples(here, name):
    inputs = opened(whole(here, name))
    assert total(inputs) == (5 if name == "s.tar" else None)
    items = media(inputs)
    assert list(items) == [f"{name}/{id}" for id in IDS] == ids(inputs)
    first, clip, left, right, last = items.values()
    assert first.fields == {
        "id": first.id,
        "name": "0001.png",
        "stem": "0001",
        "folder": "d",
        "key": "d/0001",
        "who": "Ann",
        "n": 1,
        "txt": "a cat",
        "cls": 7,
    }
    assert [item.read() for item in items.values()] == [png(1), make_clip(4), png(3), png(4), png(6)]
    assert left.fields["meta.json"] == right.fields["meta.json"] == {"x": 1}
    assert len({item.signature for item in items.values()}) == 5
    assert [item.signature for item in items.values()] == [item.signature for item in inputs]
    assert (clip.size, last.fields["key"]) == (len(make_clip(4)), "d/0006")


def test_columns_that_are_named(here):
    touch(here / "s.tar", tar({"a.png": png(1), "a.json": b'{"ask": "Why?", "uid": 3}'}))
    (item,) = opened("s.tar", columns=Columns(prompt="ask", id="uid"))
    assert (item.prompt, item.id) == ("Why?", "3")


def test_shards(here):
    for number in (0, 1, 3):
        touch(here / f"s-{number:06}.tar", tar({"a.png": png(number)}))
    inputs = opened("s-{000000..000003}.tar")
    found = list(inputs)
    assert [one.id for one in found] == ["s-000000.tar/a", "s-000001.tar/a", "s-000002.tar", "s-000003.tar/a"]
    assert unreadable(found)[0].message == "cannot read it: No such file or directory"
    assert total(inputs) == 3
    assert ids(opened("s-*.tar")) == ["s-000000.tar/a", "s-000001.tar/a", "s-000003.tar/a"]


def test_what_was_there_when_it_was_found_may_be_gone_when_it_is_read(here):
    items = media(opened(whole(here)))
    with open("s.tar", "r+b") as file:
        file.truncate(100)
    with pytest.raises(BadRequestError, match="is shorter than before"):
        items["s.tar/d/0001"].read()


def test_cut_off_anywhere(here):
    """Wherever a tar ends too early, that is told, and what is in front of the end counts."""
    data = tar({f"{number}.png": bytes([number]) * 700 for number in range(5)})
    used = 5 * (512 + 1024)
    for length in (0, 1, 511, 512, 600, 1536, 1537, 2048, 2748, 3072, *range(used - 3, used + 1)):
        for name, content in (("c.tar", data[:length]), ("c.tar.gz", gzip.compress(data[:length]))):
            touch(here / name, content)
            *found, last = opened(name)
            assert (last.id, last.code) == (name, "cut_off"), length
            assert 0 <= length // 1536 - len(found) <= 1
            assert last.message.startswith(f"cut off after sample {len(found)}: ")
            assert all(one.id == f"{name}/{number}" for number, one in enumerate(found))
    touch(here / "c.tar", data[: used + 512])
    assert len(media(opened("c.tar"))) == 5
    for length in (0, 10, 100, -5000):
        touch(here / "c.tgz", gzip.compress(tar(SAMPLES))[:length])
        *found, last = opened("c.tgz")
        assert (last.code, unreadable(found)) == ("cut_off", [])


def test_damage_in_the_middle(here):
    data = tar({f"{number}.png": bytes(700) for number in range(5)})
    bad = data[: 2 * 1536 + 20] + b"damage" + data[2 * 1536 + 26 :]
    touch(here / "c.tar", bad)
    *found, last = opened("c.tar")
    assert [one.id for one in found] == ["c.tar/0"], "what else belonged to the second sample, nobody knows"
    assert (last.code, last.message) == ("unreadable", "cannot read it after sample 1: a header is damaged")
    packed = bytearray(gzip.compress(tar({f"{number}.png": png(number) for number in range(50)})))
    packed[len(packed) // 2] ^= 255
    touch(here / "c.tgz", bytes(packed))
    assert len(unreadable(opened("c.tgz"))) == 1


def special(type: bytes, name: str, size: int = 0, **more: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size = type, size
    for key, value in more.items():
        setattr(member, key, value)
    return member


def test_links_and_devices_are_passed_over(here):
    touch(here / "secret.png", png(9))
    files = {
        "a": special(tarfile.SYMTYPE, "a.png", linkname=str(here / "secret.png")),
        "b": special(tarfile.LNKTYPE, "b.png", linkname="../secret.png"),
        "c": special(tarfile.CHRTYPE, "c.png", devmajor=1, devminor=5),
        "d": special(tarfile.FIFOTYPE, "d.png"),
        "e": special(tarfile.DIRTYPE, "e.png"),
        "/etc/../x.png": png(1),
        "../../y.png": png(2),
    }
    touch(here / "h.tar", tar(files))
    items = media(opened("h.tar"))
    assert list(items) == ["h.tar//etc/../x", "h.tar/../../y"]
    assert [item.read() for item in items.values()] == [png(1), png(2)]


def raw_header(name: str, size: int, type: bytes = b"0") -> bytes:
    return special(type, name, size).tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("name", ["h.tar", "h.tar.gz"])
@pytest.mark.parametrize(
    "hostile",
    [
        raw_header("x", 2**40, tarfile.XHDTYPE) + bytes(2**20),
        raw_header("x", 2**40, tarfile.GNUTYPE_LONGNAME) + bytes(2**20),
        raw_header("x", -512, tarfile.XHDTYPE) + bytes(2**20),
        raw_header("x.png", -1024),
        raw_header("x", 2**60),
        (raw_header("x", 12, tarfile.XHDTYPE) + b"12 size=-99\n".ljust(512, b"\0")) * 3000,
        raw_header("x", 12, tarfile.XHDTYPE) + b"99 size=abc\n".ljust(512, b"\0") + raw_header("y.png", 5),
        raw_header("x.png", 100, tarfile.GNUTYPE_SPARSE) + bytes(512),
    ],
    ids=["pax", "longname", "negative pax", "negative", "beyond", "chain", "bad pax", "sparse"],
)
def test_headers_that_lie(here, name, hostile):
    data = tar({"a.png": png(1), "b.png": png(2)})[: 2 * 512 + 2 * -(-max(len(png(1)), len(png(2))) // 512) * 512]
    data = data + hostile + tar({"c.png": png(3)})
    touch(here / name, gzip.compress(data) if name.endswith("gz") else data)
    found = list(opened(name))
    assert [one.id for one in found[:2]] == [f"{name}/a", f"{name}/b"]
    assert all(isinstance(one, MediumItem) for one in found[:2])


def test_samples_that_are_too_large(here, monkeypatch):
    monkeypatch.setattr(tars, "_MOST_FILES", 3)
    files = {
        "a.png": png(1),
        "big.png": png(1) + bytes(100_000),
        "big.txt": b"text",
        "many.0.png": b"",
        "many.1.png": b"",
        "many.2.png": b"",
        "many.3.png": b"",
        "z.png": png(2),
        "z.txt": b"x" * 2**20 + b"x",
    }
    touch(here / "s.tar", tar(files))
    found = list(opened("s.tar"))
    assert [one.id for one in found] == ["s.tar/a", "s.tar/big", "s.tar/many", "s.tar/z"]
    big, many = unreadable(found)
    assert big.message.startswith("big.png has 1")
    assert "the limit is 100000 (setting --media-max-bytes)" in big.message
    assert many.message == "it has more than 3 files"
    assert "txt" not in found[-1].fields
    touch(here / "s.tgz", gzip.compress(tar({f"a.{number}.png": bytes(90_000) for number in range(3)})))
    (one,) = unreadable(opened("s.tgz"))
    assert one.message == "its files have more than 200000 bytes (setting --max-video-bytes)"


def test_members_are_forgotten(here):
    touch(here / "s.tar", tar({f"{number}.png": b"" for number in range(2000)}))
    found = iter(opened("s.tar"))
    assert sum(1 for _ in itertools.islice(found, 1500)) == 1500
    assert sum(type(one) is tarfile.TarInfo for one in gc.get_objects()) < 20


def test_members_are_pulled(here):
    """What is behind those that were asked for is not read; of a file that is not packed, pictures neither."""
    data = tar({f"{number:03}.png": png(number) for number in range(200)})
    touch(here / "s.tar", data)
    found = iter(opened("s.tar"))
    items = list(itertools.islice(found, 3))
    with open("s.tar", "r+b") as file:
        file.truncate(len(data) // 2)
    assert items[2].read() == png(2)
    *rest, last = found
    assert last.code == "cut_off"
    assert 80 < len(rest) < 100
