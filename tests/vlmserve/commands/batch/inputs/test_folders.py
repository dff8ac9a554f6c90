"""Folders, files and patterns."""

from __future__ import annotations

import itertools
import os
import types

import pytest

from tests.vlmserve.commands.batch.inputs.found import ids, media, opened, total, touch, unreadable
from tests.vlmserve.commands.warmup.media import png
from vlmserve.commands.batch.inputs import trees
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current folder with pics/, in which are what belongs to a caption run and what does not."""
    monkeypatch.chdir(tmp_path)
    for name in ("pics/a.png", "pics/b.JPG", "pics/deep/er/c.webp", "pics/deep/noname"):
        touch(tmp_path / name, png(len(name)))
    for name in ("pics/a.txt", "pics/a.json", "pics/notes", "pics/.hidden.png", "pics/.thumbs/d.png", "pics/x.tar"):
        touch(tmp_path / name, b"{")
    return tmp_path


ALL = ["pics/a.png", "pics/b.JPG", "pics/deep/er/c.webp", "pics/deep/noname"]


def test_a_folder_is_searched_with_all_that_is_in_it(here):
    inputs = opened("pics")
    assert ids(inputs) == ids(inputs) == ALL
    assert total(inputs) == 4
    item = media(inputs)["pics/deep/er/c.webp"]
    assert item.fields == {"id": item.id, "name": "c.webp", "stem": "c", "folder": "er"}
    assert (str(item.path), str(item.root)) == ("pics/deep/er/c.webp", "pics")
    assert item.read() == (here / item.id).read_bytes()
    assert item.size == len(item.read())


def test_ids_begin_as_the_word_does(here):
    assert ids(opened(here / "pics")) == [str(here / name) for name in ALL]
    assert ids(opened("pics/deep/", "pics/a.png")) == ["pics/deep/er/c.webp", "pics/deep/noname", "pics/a.png"]
    inputs = opened("pics", "pics/a.png", "pics/deep", "pics")
    assert (sorted(ids(inputs)), total(inputs)) == (ALL, 4), "words that overlap bring nothing twice"


def test_odd_names(here):
    touch(here / "set[1]/below/a.png", png(1))
    (item,) = media(opened("set[1]")).values()
    assert (item.id, str(item.root)) == ("set[1]/below/a.png", "set[1]")
    touch(here / "http:x.png", png(1))
    assert media(opened("http:x.png"))["./http:x.png"].read() == png(1)
    with open(os.fsencode("pics/deep/") + b"\xff.png", "wb") as file:
        file.write(png(7))
    item = media(opened("pics"))["pics/deep/\\xff.png"]
    assert (item.fields["name"], item.read()) == ("\\xff.png", png(7))


def test_links_in_circles(here):
    (here / "pics/deep/up").symlink_to("..")
    (here / "pics/itself.png").symlink_to("itself.png")
    (here / "other/deeper").mkdir(parents=True)
    touch(here / "other/deeper/o.png", png(1))
    for name in ("one", "two"):
        (here / "other/deeper" / name).symlink_to("../../pics")
    assert ids(opened("pics")) == [*ALL, "pics/itself.png"]
    found = ids(opened("other"))
    assert found[0] == "other/deeper/o.png"
    assert found[1:] == [f"other/deeper/one/{name[5:]}" for name in [*ALL, "pics/itself.png"]], "followed once"


def test_files_that_cannot_be_read_come_as_items(here):
    items = media(opened("pics"))
    (here / "pics/a.png").unlink()
    with pytest.raises(BadRequestError, match="No such file"):
        items["pics/a.png"].read()
    (here / "pics/gone.png").symlink_to("nowhere")
    os.mkfifo(here / "pics/pipe.png")
    touch(here / "pics/text.png", b"no picture")
    touch(here / "pics/huge.png", png(1) + bytes(100_000))
    reasons = ("No such file", "not a regular file", "neither a picture nor a video", "the limit is 100000")
    for name, why in zip(("gone", "pipe", "text", "huge"), reasons, strict=True):
        with pytest.raises(BadRequestError, match=why):
            media(opened("pics"))[f"pics/{name}.png"].read()
    os.utime("pics/b.JPG", ns=(1, 1))
    changed = [
        id for id, item in media(opened("pics")).items() if id in items and item.signature != items[id].signature
    ]
    assert changed == ["pics/b.JPG"], "a changed file is another one"


def test_a_folder_that_cannot_be_read_is_told_and_the_rest_goes_on(here, monkeypatch):
    scandir = os.scandir

    def refuses(path):
        if os.fspath(path) == "pics/deep":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(trees.os, "scandir", refuses)
    found = list(opened("pics"))
    assert [one.id for one in found] == ["pics/a.png", "pics/b.JPG", "pics/deep"]
    (one,) = unreadable(found)
    assert (one.message, one.code) == ("cannot read the folder: Permission denied", "unreadable")


class _Endless:
    """What os.scandir might give of a folder that has no end."""

    def __init__(self) -> None:
        self.given = 0

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        return types.SimpleNamespace(
            name=f"{self.given:09}.png", is_dir=lambda: False, is_file=lambda: True, is_symlink=lambda: False
        )


@pytest.mark.parametrize("word", ["pics", "pics/*.png", "pics/**/*.png", "pics/**"])
def test_a_folder_without_end_is_pulled(here, monkeypatch, word):
    inputs = opened(word)
    endless = _Endless()
    monkeypatch.setattr(trees.os, "scandir", lambda path: endless)
    assert [found.id for found in itertools.islice(inputs, 3)] == [f"pics/{number:09}.png" for number in (1, 2, 3)]
    endless.given = 0
    last = list(itertools.islice(inputs, 6000))[-1]
    assert last.id == "pics/000006000.png"
    assert endless.given == 6000


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("pics/*.png", ALL[:1]),
        ("pics/*", ALL),
        ("pics/**/*.webp", ALL[2:3]),
        ("pics/**", ALL),
        ("**/er/*", ALL[2:3]),
        ("pics/*/er", ALL[2:3]),
        ("pics/[ab].*", ALL[:2]),
        ("pics/*.json", ["pics/a.json"]),
        ("pics/.h*.png", ["pics/.hidden.png"]),
    ],
)
def test_patterns(here, pattern, expected):
    inputs = opened(pattern)
    assert ids(inputs) == expected
    assert total(inputs) == len(expected)
    assert ids(opened(here / pattern)) == [str(here / name) for name in expected]
    root = "pics" if pattern.startswith("pics") else "."
    assert {str(found.root) for found in inputs} == {root}


def test_numbered_names(here):
    for number in (8, 9, 10):
        touch(here / f"n-{number:03}.png", png(number))
    inputs = opened("n-{008..010}.png")
    assert ids(inputs) == ["n-008.png", "n-009.png", "n-010.png"]
    assert total(inputs) == 3
    with pytest.raises(SettingsError, match=r"stands for 1000000000 names"):
        opened("n-{0..999999999}.png")


@pytest.mark.parametrize("word", ["nowhere", "pics/none.png", "*.none", "none-{0..3}.png", "pics/a.png/b"])
def test_words_that_stand_for_nothing(here, word):
    with pytest.raises(SettingsError, match=r"INPUT '.*': "):
        opened(word)
