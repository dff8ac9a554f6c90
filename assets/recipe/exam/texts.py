"""Printed texts: short upright ones, drawn four times larger than they will be and reduced, so that edges are smooth.

The faces are Pillow's built-in one and, if matplotlib is installed, some of matplotlib's. An exam depends on its seed
and on these faces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFont

from assets.recipe.exam.chance import log_uniform, pick
from assets.recipe.exam.colours import RGB
from assets.recipe.exam.figures import Box, Field

SMALLEST_TEXT, LARGEST_TEXT = 0.12, 0.30  # the font's size (em) as a share of the picture's short side
BUILT_IN = "built-in"
_FILES: Mapping[str, str] = MappingProxyType(
    {
        "DejaVu Sans": "DejaVuSans.ttf",
        "DejaVu Serif": "DejaVuSerif.ttf",
        "DejaVu Mono": "DejaVuSansMono.ttf",
        "STIX General": "STIXGeneral.ttf",
    }
)
_ENLARGED = 4
_MARGIN = 1.0  # pixels


@dataclass(frozen=True)
class Text:
    """One printed text; `em` is the font's size and `left`, `top` the corner of its ink, in pixels (whole quarters)."""

    characters: str
    face: str
    em: float
    rgb: RGB
    left: float
    top: float

    @property
    def box(self) -> Box:
        """The bounding box of the ink: left, top, right, bottom, in pixels from the picture's top left corner."""
        high, wide = (side / _ENLARGED for side in _ink(self.characters, self.face, self.em).shape)
        return self.left, self.top, self.left + wide, self.top + high


@lru_cache
def faces() -> Mapping[str, Path | None]:
    """The faces that are installed here: their names and files (None: Pillow's own)."""
    matplotlib = find_spec("matplotlib")
    found: dict[str, Path | None] = {BUILT_IN: None}
    if matplotlib is not None and matplotlib.origin is not None:
        folder = Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf"
        found |= {name: folder / file for name, file in _FILES.items() if (folder / file).is_file()}
    return MappingProxyType(found)


def sample_text(rng: Generator, characters: str, rgb: RGB, width: int, height: int) -> Text:
    """`characters` (six at most) in any face and any permitted size at which they fit, anywhere in the picture."""
    face, short = pick(rng, tuple(faces())), min(width, height)
    high, wide = (side / _ENLARGED / 64 for side in _ink(characters, face, 64.0).shape)  # of the em, about
    room = 0.98 * min((width - 2 * _MARGIN) / wide, (height - 2 * _MARGIN) / high)
    em = log_uniform(rng, SMALLEST_TEXT * short, min(LARGEST_TEXT * short, room))
    high, wide = (side / _ENLARGED for side in _ink(characters, face, em).shape)
    left, top = rng.uniform(_MARGIN, width - _MARGIN - wide), rng.uniform(_MARGIN, height - _MARGIN - high)
    return Text(characters, face, em, rgb, *(math.floor(start * _ENLARGED) / _ENLARGED for start in (left, top)))


def write(canvas: Field, text: Text) -> None:
    """Print `text` on `canvas`, `[height, width, 3]` in 0..255, in place."""
    ink = _ink(text.characters, text.face, text.em)
    left, top = math.floor(text.left), math.floor(text.top)
    skipped = round((text.top - top) * _ENLARGED), round((text.left - left) * _ENLARGED)
    rows, columns = (-(-(skip + side) // _ENLARGED) for skip, side in zip(skipped, ink.shape, strict=True))
    large = np.zeros((rows * _ENLARGED, columns * _ENLARGED), np.float32)
    large[skipped[0] : skipped[0] + ink.shape[0], skipped[1] : skipped[1] + ink.shape[1]] = ink
    share = large.reshape(rows, _ENLARGED, columns, _ENLARGED).mean(axis=(1, 3))[:, :, None] / np.float32(255)
    under = canvas[top : top + rows, left : left + columns]
    under += share * (np.array(text.rgb, np.float32) - under)


@lru_cache(maxsize=8)
def _ink(characters: str, face: str, em: float) -> npt.NDArray[np.uint8]:
    """The enlarged characters, 0..255, cut to where there is ink: `[height, width]`."""
    file, size = faces()[face], em * _ENLARGED
    font = ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)
    edge = math.ceil(size)
    image = Image.new("L", (math.ceil(font.getlength(characters)) + 2 * edge, 3 * edge))
    ImageDraw.Draw(image).text((edge, edge), characters, fill=255, font=font)
    return np.asarray(image.crop(image.getbbox()))
