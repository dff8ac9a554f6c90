"""Decodes picture bytes to upright RGB pixels.

Pillow reads a file's header, and decodes the file only when the size in the header has passed the limits. Pillow's
module-level limits stay untouched. The process that decodes the file bounds all other costs.

8-bit pictures become what `convert_to_rgb` in transformers' image_transforms makes of them, which lays transparency on
white. (`load_image` there drops transparency, and so does `to_rgb` of qwen_vl_utils for all modes except RGBA: hidden
colours would show.) Wider grey is scaled. Both references cut it off at 255, which turns nearly everything white.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageFile, features

from processors.formats import INVALID_IMAGE, FileFormat, file_format, first_bytes, words
from processors.resize import MAX_ASPECT_RATIO
from vlmserve_common.errors import BadRequestError

# Exif orientation -> what brings the picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """Limits of decoding. `max_image_pixels`: the most pixels (width * height) of the original, before any resizing."""

    max_image_pixels: int = 64 * 10**6

    @property
    def max_side(self) -> int:
        """The longest allowed side in pixels: that of a picture with `max_image_pixels` and the most extreme aspect
        ratio.

        Pillow keeps a pointer for each row, and decoders work by rows, so thin pictures cost far more than their
        pixels.
        """
        return math.isqrt(self.max_image_pixels * MAX_ASPECT_RATIO)


def decode_image(data: bytes, limits: DecodeLimits) -> Image.Image:
    """Decode the first picture in `data`: upright by its EXIF orientation, mode RGB, transparency laid on white.

    Raises BadRequestError for anything but a whole picture of a supported format within the limits.
    """
    found = _picture_format(data)
    with _refusing(lambda error: _explain_header(found.name, error)):
        try:
            image = _open(found, data)
        except Image.DecompressionBombError as error:  # some plugins ask before we can, with Pillow's limit
            size = re.search(r"\d+", str(error))
            raise _too_large(f"{found.name} picture of {size.group() if size else 'far more'} pixels", limits) from None
    return _decode(image, limits, f"the {found.name} picture is broken or cut off")


def _picture_format(data: bytes) -> FileFormat:
    if not data:
        raise BadRequestError("the picture is empty (zero bytes)", code=INVALID_IMAGE)
    found = file_format(data)
    without_avif = not features.check("avif")  # as this Pillow was built
    if found is not None and found.plugin and not (found.name == "AVIF" and without_avif):
        return found
    if found is not None and found.kind == "video":
        what = f"the data is {found.called}, not a picture: send it in a part of type video_url, or video"
        raise BadRequestError(what, code=INVALID_IMAGE)
    readable = f"pictures of the formats PNG, JPEG, WebP, GIF, BMP, TIFF{'' if without_avif else ', AVIF'} are read"
    if found is not None:
        what = f"the data is {found.called}, which is not a supported picture; {readable}"
    else:
        what = f"the data is not a picture of a supported format; {readable}, and it begins with {first_bytes(data)}"
    raise BadRequestError(what, code=INVALID_IMAGE)


def check_pixels(image: Image.Image, limits: DecodeLimits) -> None:
    """Raise BadRequestError for a picture with no pixels, too many pixels or too long a side. Reads the size only."""
    width, height = image.size
    if width < 1 or height < 1:
        raise BadRequestError(f"the picture has no pixels ({width}x{height})", code=INVALID_IMAGE)
    if width * height > limits.max_image_pixels:
        raise _too_large(f"picture of {width}x{height} = {width * height} pixels", limits)
    if max(width, height) > limits.max_side:
        raise BadRequestError(
            f"a picture of {width}x{height} pixels: its longer side may be {limits.max_side} pixels, "
            f"those of {limits.max_image_pixels} pixels (setting --max-image-pixels) at {MAX_ASPECT_RATIO}:1",
            code="image_too_large",
        )


def normalize_image(image: Image.Image, limits: DecodeLimits) -> Image.Image:
    """Check and convert a Pillow picture: limits, upright, RGB. Raises BadRequestError."""
    return _decode(image, limits, "the picture cannot be read")


def _decode(image: Image.Image, limits: DecodeLimits, failed: str) -> Image.Image:
    """Decode an opened picture. `failed`: the text before the reason when decoding fails."""
    check_pixels(image, limits)
    with _refusing(lambda error: f"{failed}: {words(error)}"):
        image.load()
        return _turn_upright(to_rgb(image), image)


@contextlib.contextmanager
def _refusing(explain: Callable[[Exception], str]) -> Iterator[None]:
    """Turn every exception of Pillow into a BadRequestError: its plugins fail on broken files in many ways."""
    try:
        yield
    except BadRequestError:
        raise
    except Exception as error:
        raise BadRequestError(explain(error), code=INVALID_IMAGE) from error


def _open(found: FileFormat, data: bytes) -> ImageFile.ImageFile:
    """Read the header only. `Image.open` would do the same, but its warning about sizes is global state."""
    assert found.plugin is not None
    return getattr(importlib.import_module(found.plugin), found.opener)(io.BytesIO(data), "")


def _explain_header(name: str, error: Exception) -> str:
    text = words(error)
    if text == "unknown pixel mode":
        return f"the {name} picture's kind of pixels (bits, sample format, channels) is not supported; 8-bit RGB is"
    if text == "not identified by this driver":
        return f"the {name} picture is broken: its header names no size, or one of no pixels"
    return f"the {name} picture is broken: {text}"


def _too_large(what: str, limits: DecodeLimits) -> BadRequestError:
    return BadRequestError(
        f"a {what}; the limit is {limits.max_image_pixels} (setting --max-image-pixels)", code="image_too_large"
    )


def _turn_upright(rgb: Image.Image, source: Image.Image) -> Image.Image:
    """Return `rgb` turned upright by the Exif orientation of `source`, the picture that it was made from."""
    try:
        method = _UPRIGHT.get(source.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return rgb  # unreadable EXIF data is no reason to refuse the pixels
    if method is None:
        return rgb
    upright = rgb.transpose(method)
    upright.info = {}  # or a later reader of the orientation would turn it again
    return upright


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
