"""Draws the sample media of this folder: python assets/draw.py [FOLDER]. What to ask about them is in samples.json."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

_SCALE = 4  # drawn larger and reduced, for smooth edges
Point = tuple[float, float]


class Canvas:
    """A picture in progress; lengths are in its final pixels."""

    def __init__(self, width: int, height: int, ground: str) -> None:
        self._picture = Image.new("RGB", (width * _SCALE, height * _SCALE), ground)
        self._pen = ImageDraw.Draw(self._picture)

    def _polygon(self, points: list[Point], fill: str) -> None:
        self._pen.polygon([(x * _SCALE, y * _SCALE) for x, y in points], fill=fill)

    def circle(self, centre: Point, radius: float, fill: str) -> None:
        """A disc."""
        x, y = centre
        self._pen.ellipse([(v * _SCALE) for v in (x - radius, y - radius, x + radius, y + radius)], fill=fill)

    def square(self, centre: Point, half: float, fill: str, turn: float = 0) -> None:
        """half: of a side. turn: degrees."""
        angles = [math.radians(turn + 45 + 90 * k) for k in range(4)]
        reach = half * math.sqrt(2)
        self._polygon([(centre[0] + reach * math.cos(a), centre[1] + reach * math.sin(a)) for a in angles], fill)

    def triangle(self, centre: Point, half: float, fill: str) -> None:
        """Upright; half: of its width and height."""
        x, y = centre
        self._polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill)

    def star(self, centre: Point, radius: float, fill: str) -> None:
        """Five points."""
        points = []
        for k in range(10):
            reach = radius if k % 2 == 0 else 0.42 * radius
            angle = math.pi * (k / 5 - 0.5)
            points.append((centre[0] + reach * math.cos(angle), centre[1] + reach * math.sin(angle)))
        self._polygon(points, fill)

    def text(self, centre: Point, text: str, size: int, fill: str = "black") -> None:
        """Printed, middle at `centre`."""
        font = ImageFont.load_default(size * _SCALE)
        self._pen.text((centre[0] * _SCALE, centre[1] * _SCALE), text, fill=fill, font=font, anchor="mm")

    def done(self) -> Image.Image:
        """The picture."""
        return self._picture.reduce(_SCALE)


def pictures() -> Iterator[tuple[str, Image.Image]]:
    """File names and pictures."""
    c = Canvas(448, 320, "#f6f3ec")
    c.circle((96, 100), 60, "#d7263d")
    c.square((335, 113), 62, "#1b6ca8")
    c.triangle((130, 238), 60, "#2a9d4a")
    c.star((285, 248), 62, "#ffd21f")
    yield "shapes.png", c.done()

    c = Canvas(256, 256, "white")
    c.circle((70, 72), 46, "#e01b24")
    yield "red-circle.png", c.done()

    c = Canvas(64, 64, "#20325c")
    c.star((42, 24), 17, "#ffd21f")
    yield "small-star.png", c.done()

    c = Canvas(1024, 512, "#bfe3c8")
    c.square((180, 380), 92, "#7b2cbf", turn=12)
    c.triangle((800, 150), 100, "#111111")
    yield "wide.jpg", c.done()

    c = Canvas(320, 480, "#3a3f44")
    c.circle((160, 90), 55, "white")
    c.circle((160, 250), 45, "#ff8c1a")
    c.square((160, 400), 48, "#1f9d3a", turn=-8)
    yield "tower.png", c.done()

    c = Canvas(360, 360, "#e9d8f5")
    for x, y in ((70, 70), (190, 90), (300, 60), (90, 220), (250, 230), (170, 310)):
        c.circle((x, y), 34, "#1d4ed8")
    yield "six.png", c.done()

    c = Canvas(300, 220, "#8a1c1c")
    c.star((80, 110), 55, "white")
    c.star((220, 110), 55, "#ffd21f")
    yield "two-stars.jpg", c.done()

    c = Canvas(240, 240, "#fdf6e3")
    c.square((120, 120), 70, "#111111")
    yield "black-square.png", c.done()

    c = Canvas(260, 200, "#cde7ff")
    c.triangle((70, 130), 45, "#1f9d3a")
    c.circle((185, 70), 40, "#7b2cbf")
    yield "album-1.png", c.done()

    c = Canvas(260, 200, "#fff3bf")
    c.square((80, 90), 42, "#1d4ed8")
    c.star((190, 120), 45, "#e01b24")
    yield "album-2.png", c.done()

    c = Canvas(320, 200, "white")
    c.text((160, 100), "HELLO", 64)
    yield "word.png", c.done()

    c = Canvas(320, 240, "#14532d")
    c.text((160, 120), "4071", 72, "white")
    yield "number.png", c.done()

    rng = np.random.default_rng(4)
    speckle = Image.fromarray(rng.integers(0, 256, (160, 200, 3), np.uint8)).filter(ImageFilter.GaussianBlur(1))
    yield "noise.png", speckle

    c = Canvas(320, 400, "white")
    c.text((160, 36), "CORNER CAFE", 30)
    c.text((160, 70), "Table 7", 20, "#444444")
    for row, (item, price) in enumerate((("2 coffee", "6.40"), ("1 tea", "2.80"), ("3 apple cake", "12.60"))):
        c.text((100, 130 + 40 * row), item, 22)
        c.text((260, 130 + 40 * row), price, 22)
    c.text((100, 290), "TOTAL", 26)
    c.text((260, 290), "21.80", 26)
    c.text((160, 360), "Thank you!", 20, "#444444")
    yield "receipt.png", c.done()


FPS = 8


def clips() -> Iterator[tuple[str, list[Image.Image]]]:
    """File names and frames, at FPS a second."""
    frames = []
    for k in range(4 * FPS):
        c = Canvas(192, 160, "#f4f1de")
        c.circle((30 + 132 * k / (4 * FPS - 1), 80), 22, "#e01b24")
        frames.append(c.done())
    yield "rolling.mp4", frames

    frames = []
    for k in range(4 * FPS):
        c = Canvas(176, 176, "white")
        c.square((88, 88), 40, "#1d4ed8" if k < 2 * FPS else "#1f9d3a")
        frames.append(c.done())
    yield "turns-green.mp4", frames


def write_clip(path: Path, frames: list[Image.Image]) -> None:
    """H.264 in MP4."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS), options={"crf": "20", "threads": "1"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


def main(folder: Path) -> None:
    """Write every file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures():
        options = {"quality": 90} if name.endswith(".jpg") else {"optimize": True}
        picture.save(folder / name, **options)
    for name, frames in clips():
        write_clip(folder / name, frames)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "samples")
