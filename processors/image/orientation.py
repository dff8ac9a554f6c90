"""Bringing a picture upright by its Exif orientation."""

from __future__ import annotations

from PIL import Image

from processors.image.limits import check_count
from processors.image.tiff_structure import check_exif

_ORIENTATION_TAG = 0x0112
# ImageMagick's, in a PNG's text: hexadecimal digits behind three lines.
_EXIF_AS_TEXT, _MOST_LETTERS = "Raw profile type exif", 3 * 2**20

# Orientation -> what brings the picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def turn_upright(rgb: Image.Image, source: Image.Image) -> Image.Image:
    """`rgb`, upright by the orientation of `source`, which it was made of.

    Raises BadRequestError for Exif data that are costly to read.
    """
    _check_exif(source)
    try:
        orientation = source.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:
        return rgb  # unreadable EXIF data is no reason to refuse the pixels
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    if method is None:
        return rgb
    upright = rgb.transpose(method)
    upright.info = {}  # or whoever gets it would read the orientation, and turn it, again
    return upright


def _check_exif(image: Image.Image) -> None:
    """Exif data that Pillow takes apart only now, those of PNG and WebP."""
    format = image.format or ""
    exif, text = image.info.get("exif"), image.info.get(_EXIF_AS_TEXT)
    if exif is None and isinstance(text, str):
        check_count(format, "letters of Exif data", len(text), _MOST_LETTERS)
        try:
            exif = bytes.fromhex("".join(text.split("\n")[3:]))  # as Pillow has it
        except ValueError:
            return
    if isinstance(exif, bytes):
        check_exif(format, exif)
