"""Draws the boxes and points of an answer on their picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from processors.image.decoding import DecodeLimits, decode_image
from vlmserve.commands.client.boxes import Marks, parse_boxes
from vlmserve_common.errors import BadRequestError

_LONGEST_SIDE = 1600  # of the drawing, in pixels
_COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#f032e6")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A picture with marks. rows: number, label, and x1, y1, x2, y2 in pixels of the sent picture.

    A point has equal corners. problems: a sentence for each mark that could not be read.
    """

    image: Image.Image
    rows: tuple[tuple[int, str, int, int, int, int], ...]
    problems: tuple[str, ...]


def draw_marks(text: str, media: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> Drawing | None:
    """Draw the answer's marks on the last picture of the conversation; None without marks or picture.

    media: the server's report. files: the same media, in the same order. Raises OSError for a file that is gone.
    """
    pictures = [pair for pair in zip(files, media, strict=False) if pair[1]["kind"] == "image"]
    marks = parse_boxes(text)
    if not pictures or not (marks.boxes or marks.points):
        return None
    path, medium = pictures[-1]
    try:
        picture = decode_image(path.read_bytes(), DecodeLimits())
        marks = marks.to_source(medium)
    except (BadRequestError, ValueError):  # too large for this process, or in unknown coordinates
        return None
    rows = tuple(_rows(marks))
    return Drawing(image=_draw(picture, rows), rows=rows, problems=marks.problems)


def _rows(marks: Marks) -> list[tuple[int, str, int, int, int, int]]:
    boxes = [(box.label, box.x1, box.y1, box.x2, box.y2) for box in marks.boxes]
    points = [(point.label, point.x, point.y, point.x, point.y) for point in marks.points]
    return [
        (number, label or "", round(x1), round(y1), round(x2), round(y2))
        for number, (label, x1, y1, x2, y2) in enumerate(boxes + points, 1)
    ]


def _draw(picture: Image.Image, rows: Sequence[tuple[int, str, int, int, int, int]]) -> Image.Image:
    """Draw marks with numbers. The one font at hand lacks most letters of labels."""
    scale = min(1.0, _LONGEST_SIDE / max(picture.size))
    if scale < 1:
        picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))
    image = picture.copy()
    draw = ImageDraw.Draw(image)
    side = max(image.size)
    width, font = max(2, side // 300), ImageFont.load_default(max(12, side // 40))
    for number, _, x1, y1, x2, y2 in rows:
        colour = _COLOURS[(number - 1) % len(_COLOURS)]
        left, right = (_within(x * scale, image.width) for x in sorted((x1, x2)))
        top, bottom = (_within(y * scale, image.height) for y in sorted((y1, y2)))
        if (x1, y1) == (x2, y2):
            radius = 3 * width
            draw.ellipse((left - radius, top - radius, left + radius, top + radius), outline=colour, width=width)
        else:
            draw.rectangle((left, top, right, bottom), outline=colour, width=width)
        draw.text(
            (left + 2 * width, top + width), str(number), fill=colour, font=font, stroke_width=1, stroke_fill="white"
        )
    return image


def _within(place: float, size: int) -> int:
    return min(max(round(place), 0), size - 1)
