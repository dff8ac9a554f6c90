"""Any picture's pixels as 8-bit RGB.

8-bit pictures become what `convert_to_rgb` of transformers' image_transforms makes of them, which lays transparency on
white. (`load_image` there drops it, and `to_rgb` of qwen_vl_utils does for all but RGBA: hidden colours would show.)
Wider grey, which both cut off at 255 so that nearly everything turns white, is scaled.
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
    """Mode RGB; alpha and transparent colours are laid on white, 9 to 16 bits of grey are scaled to 8 and rounded.

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
    """Signed and 32-bit pixels of a TIFF, whose range no one knows: small values would come out as nearly black."""
    tags = getattr(image, "tag_v2", {})
    bits = _first(tags.get(_BITS_PER_SAMPLE), 1)
    if _first(tags.get(_SAMPLE_FORMAT), 1) == _SIGNED:
        raise BadRequestError(
            f"pictures with signed pixels (here of {bits} bits) are not supported", code=INVALID_IMAGE
        )
    if bits > 16:
        raise BadRequestError(f"pictures with pixels of {bits} bits are not supported, 16 are", code=INVALID_IMAGE)


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """A picture in bands of many rows, and where each begins.

    Not as a whole, since four such copies would take a gigabyte for the largest ones; not row by row, since each step
    takes microseconds with Python's lock held, and a thin picture has many rows.
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
    """Modes I;16*, and I as long as its values fit 16 bits. They are taken for 16-bit ones unless a TIFF says fewer."""
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
