"""Converts any picture's pixels to 8-bit RGB.

8-bit pictures equal the result of `convert_to_rgb` in transformers' image_transforms, which lays transparency on white.
(`load_image` there drops transparency, and so does `to_rgb` of qwen_vl_utils for all modes except RGBA: hidden colours
would show.) Wider grey is scaled. Both references cut it off at 255, which turns nearly everything white.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

from processors.formats import INVALID_IMAGE
from vlmserve_common.errors import BadRequestError

_WHITE = (255, 255, 255, 255)
_BAND_PIXELS = 2**20
# TIFF 6.0: tags, and their values.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO, _SIGNED = 0, 2


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to mode RGB: alpha and transparent colours on white, grey of 9 to 16 bits scaled to 8 bits and rounded.

    Raises BadRequestError for pixels in floating point, signed ones and those of more than 16 bits.
    """
    transparency = image.info.get("transparency")
    if image.mode == "RGB" and transparency is None:
        return image
    if image.mode == "F":
        raise BadRequestError("pictures with floating-point pixels are not supported", code=INVALID_IMAGE)
    _check_samples(image)
    if image.mode.startswith("I"):
        return _wide_grey_to_rgb(image)
    if "A" in image.getbands() or "a" in image.getbands() or transparency is not None:
        return _on_white(image)
    return image.convert("RGB")


def _check_samples(image: Image.Image) -> None:
    """Refuse signed and 32-bit pixels of a TIFF. Their range is unknown: small values would become nearly black."""
    tags = getattr(image, "tag_v2", {})
    bits = _first(tags.get(_BITS_PER_SAMPLE), 1)
    if _first(tags.get(_SAMPLE_FORMAT), 1) == _SIGNED:
        raise BadRequestError(
            f"pictures with signed pixels (here of {bits} bits) are not supported", code=INVALID_IMAGE
        )
    if bits > 16:
        raise BadRequestError(f"pictures with pixels of {bits} bits are not supported, 16 are", code=INVALID_IMAGE)


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Cut a picture into bands of many rows; yields each band with its first row.

    Four copies of the whole would take a gigabyte for the largest pictures. Single rows would take microseconds each
    with Python's lock held, and a thin picture has many rows.
    """
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _on_white(image: Image.Image) -> Image.Image:
    rgb = Image.new("RGB", image.size)
    for top, band in _bands(image):
        if band.mode in ("La", "RGBa"):  # colours multiplied by alpha
            band = band.convert("RGBA" if band.mode == "RGBa" else "LA")
        white = Image.new("RGBA", band.size, _WHITE)
        rgb.paste(Image.alpha_composite(white, band.convert("RGBA")).convert("RGB"), (0, top))
    return rgb


def _wide_grey_to_rgb(image: Image.Image) -> Image.Image:
    """Convert modes I;16*, and I if its values fit 16 bits. Values count as 16-bit unless a TIFF gives fewer bits."""
    ranges = [(int(wide.min()), int(wide.max())) for wide in (np.asarray(band) for _, band in _bands(image))]
    least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
    if least < 0 or most > 0xFFFF:
        raise BadRequestError(
            f"the picture's pixels have values from {least} to {most}; whole numbers from 0 to 65535 are supported",
            code=INVALID_IMAGE,
        )
    tags = getattr(image, "tag_v2", {})
    white = 2 ** _first(tags.get(_BITS_PER_SAMPLE), 16) - 1
    white = white if 0xFF < white < 0xFFFF and most <= white else 0xFFFF
    # Pillow turns 8-bit pictures of this kind around, but not wider ones.
    inverted = image.mode != "I" and _first(tags.get(_PHOTOMETRIC), 1) == _WHITE_IS_ZERO
    transparent = image.info.get("transparency")
    rgb = Image.new("RGB", image.size)
    for top, band in _bands(image):
        wide = np.asarray(band)
        grey = ((wide.astype(np.int32) * 255 + white // 2) // white).astype(np.uint8)
        if inverted:
            np.subtract(255, grey, out=grey)
        if isinstance(transparent, int):
            grey[wide == transparent] = 255
        rgb.paste(Image.fromarray(grey).convert("RGB"), (0, top))
    return rgb


def _first(value: int | tuple[int, ...] | None, default: int) -> int:
    value = value[0] if isinstance(value, tuple) and value else value
    return value if isinstance(value, int) else default
