"""Draws the sample pictures of this folder: python assets/draw.py [FOLDER]."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_SCALE = 4  # drawn larger and reduced, for smooth edges


def draw_shapes() -> Image.Image:
    """Four coloured shapes on a pale ground: things to count, name and place. 448x320."""
    picture = Image.new("RGB", (448 * _SCALE, 320 * _SCALE), "#f6f3ec")
    pen = ImageDraw.Draw(picture)

    def scaled(*values: float) -> tuple[float, ...]:
        return tuple(value * _SCALE for value in values)

    pen.ellipse(scaled(36, 40, 156, 160), fill="#d7263d")
    pen.rectangle(scaled(270, 48, 400, 178), fill="#1b6ca8")
    pen.polygon([scaled(60, 290), scaled(130, 186), scaled(200, 290)], fill="#2a9d4a")
    star = []
    for point in range(10):
        radius = 62 if point % 2 == 0 else 26
        angle = math.pi * (point / 5 - 0.5)
        star.append(scaled(330 + radius * math.cos(angle), 248 + radius * math.sin(angle)))
    pen.polygon(star, fill="#f2b705")
    return picture.resize((448, 320), Image.Resampling.LANCZOS)


def draw_receipt() -> Image.Image:
    """A short printed bill: something to read and to add up. 320x400."""
    picture = Image.new("RGB", (320, 400), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((160, 36), "CORNER CAFE", fill="black", font=ImageFont.load_default(30), anchor="mm")
    pen.text((160, 70), "Table 7", fill="#444444", font=ImageFont.load_default(20), anchor="mm")
    rows = [("2 coffee", "6.40"), ("1 tea", "2.80"), ("3 apple cake", "12.60")]
    for line, (name, price) in enumerate(rows):
        y = 130 + 44 * line
        pen.text((30, y), name, fill="black", font=ImageFont.load_default(24), anchor="lm")
        pen.text((290, y), price, fill="black", font=ImageFont.load_default(24), anchor="rm")
    pen.line((30, 262, 290, 262), fill="black", width=2)
    pen.text((30, 300), "Total", fill="black", font=ImageFont.load_default(30), anchor="lm")
    pen.text((290, 300), "21.80", fill="black", font=ImageFont.load_default(30), anchor="rm")
    pen.text((160, 365), "Thank you!", fill="#444444", font=ImageFont.load_default(20), anchor="mm")
    return picture


def main(folder: Path) -> None:
    """Write every picture into `folder`."""
    draw_shapes().save(folder / "shapes.png", optimize=True)
    draw_receipt().save(folder / "receipt.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
