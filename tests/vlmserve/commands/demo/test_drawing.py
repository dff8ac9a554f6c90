"""Marks of an answer on the picture that they are about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmserve.commands.demo.pictures import Drawing, draw_marks

WHITE = (255, 255, 255)
FIRST = (0xE6, 0x19, 0x4B)


def report(size: tuple[int, int], kind: str = "image") -> dict[str, Any]:
    return {"kind": kind, "coordinates": "0-1000", "source_size": {"width": size[0], "height": size[1]}}


def box(*places: float, **others: Any) -> str:
    return json.dumps([{"bbox_2d": places, **others}])


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "white.png"
    Image.new("RGB", (400, 200), WHITE).save(path)
    return path


def drawn(text: str, path: Path, size: tuple[int, int] = (400, 200)) -> Drawing:
    drawing = draw_marks(text, [report(size)], [path])
    assert drawing is not None
    return drawing


def test_a_box_is_drawn_where_it_is(picture):
    drawing = drawn(box(250, 500, 500, 750, label="猫"), picture)
    assert drawing.rows == ((1, "猫", 100, 100, 200, 150),)
    image = drawing.image
    assert [image.getpixel(place) for place in ((100, 140), (200, 120), (150, 100), (150, 150))] == [FIRST] * 4
    assert [image.getpixel(place) for place in ((97, 140), (160, 140), (203, 120), (150, 153))] == [WHITE] * 4
    assert not drawing.problems
    point = drawn('{"point_2d": [500, 500], "label": "eye"}', picture)
    assert point.rows == ((1, "eye", 200, 100, 200, 100),)
    assert point.image.getpixel((206, 100)) == FIRST
    assert drawn(box(500, 750, 250, 500), picture).image.getpixel((100, 140)) == FIRST, "corners may be swapped"
    outside = drawn(box(-100, -100, 2000, 2000), picture)
    assert outside.rows[0][2:] == (-40, -20, 800, 400)
    assert outside.image.getpixel((399, 100)) == outside.image.getpixel((200, 199)) == FIRST
    assert drawn(box(0, 0, 9, 9)[:-1] + ', {"bbox_2d": [1, 2', picture).problems


def test_a_large_picture_is_shown_smaller_and_counted_whole(tmp_path):
    path = tmp_path / "large.png"
    Image.new("RGB", (3200, 800), WHITE).save(path)
    drawing = drawn(box(250, 500, 500, 750), path, (3200, 800))
    assert drawing.image.size == (1600, 400)
    assert drawing.rows[0][2:] == (800, 400, 1600, 600)
    assert drawing.image.getpixel((400, 280)) == FIRST


def test_it_is_the_last_picture_upright(picture, tmp_path):
    other = tmp_path / "sideways.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 50), WHITE).save(other, exif=exif.tobytes())
    media = [report((400, 200)), report((50, 60)), report((8, 8), "video")]
    drawing = draw_marks(box(0, 0, 1000, 1000), media, [picture, other, tmp_path / "clip.mp4"])
    assert drawing is not None
    assert drawing.image.size == (50, 60)


@pytest.mark.parametrize(
    ("text", "reports"),
    [
        ("A red circle.", [report((400, 200))]),
        ('{"bbox_2d": [1, 2', [report((400, 200))]),
        ('{"bbox_2d": []}', [report((400, 200))]),
        (box(1, 2, 3, 4), []),  # a server that reports nothing
        (box(1, 2, 3, 4), [report((4, 4), "video")]),
        (box(1, 2, 3, 4), [{**report((4, 4)), "coordinates": "polar"}]),
    ],
)
def test_no_drawing_without_marks_and_a_picture(text, reports, picture):
    assert draw_marks(text, reports, [picture]) is None
