"""Picture bytes to RGB pixels.

Nothing is decoded before its header's size has passed the pixel limit, and Pillow's module-level limits stay alone.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageFile

from processors.picture_formats import INVALID_IMAGE, PictureFormat, picture_format
from processors.rgb import to_rgb
from vlmserve.common.errors import BadRequestError

_ORIENTATION_TAG = 0x0112
_TILE_WIDTH_TAG, _TILE_LENGTH_TAG = 322, 323
_START_OF_SCAN = b"\xff\xda"
# A progressive JPEG has about ten. Each costs a pass over the whole picture, and takes no more than eleven bytes.
_MAX_JPEG_SCANS = 200

# EXIF orientation -> what brings the picture upright.
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
    """max_image_pixels: the most pixels (width * height) of a picture as it comes, before any resizing."""

    max_image_pixels: int = 64 * 10**6


def decode_image(data: bytes, limits: DecodeLimits) -> Image.Image:
    """The first picture in `data`: upright by its EXIF orientation, mode RGB, transparency laid on white.

    Raises BadRequestError for anything but a whole picture of a supported format within the limits.
    """
    found = picture_format(data)
    _check_canvas(data, limits)
    try:
        image = _open(found, data)
    except Image.DecompressionBombError as error:  # some plugins ask before we can, with Pillow's limit
        size = re.search(r"\d+", str(error))
        raise _too_large(f"{found.name} picture of {size.group() if size else 'far more'} pixels", limits) from None
    except Exception as error:  # Pillow's plugins raise whatever a broken header makes them stumble over
        raise BadRequestError(_explain_header(found.name, error), code=INVALID_IMAGE) from error
    check_pixels(image, limits)
    _check_inside(found.name, image, data, limits)
    try:
        image.load()
        rgb = to_rgb(image)
    except BadRequestError:
        raise
    except Exception as error:
        raise BadRequestError(
            f"the {found.name} picture is broken or cut off: {_words(error)}", code=INVALID_IMAGE
        ) from error
    return _turn_upright(rgb, image)


def check_pixels(image: Image.Image, limits: DecodeLimits) -> None:
    """Raises BadRequestError when the picture is larger than the limit. Reads the size only."""
    _check_size(*image.size, limits)


def _check_size(width: int, height: int, limits: DecodeLimits) -> None:
    if width < 1 or height < 1:
        raise BadRequestError(f"the picture has no pixels ({width}x{height})", code=INVALID_IMAGE)
    if width * height > limits.max_image_pixels:
        raise _too_large(f"picture of {width}x{height} = {width * height} pixels", limits)


def normalize_image(image: Image.Image, limits: DecodeLimits) -> Image.Image:
    """A picture that came as a Pillow object: limits checked, upright, RGB. Raises BadRequestError."""
    check_pixels(image, limits)
    try:
        image.load()
        return _turn_upright(to_rgb(image), image)
    except BadRequestError:
        raise
    except Exception as error:
        raise BadRequestError(f"the picture cannot be read: {_words(error)}", code=INVALID_IMAGE) from error


def _open(found: PictureFormat, data: bytes) -> ImageFile.ImageFile:
    """Read the header only. `Image.open` would do, but for its warning about sizes, which is global state."""
    opener: Callable[[io.BytesIO, str], ImageFile.ImageFile] = getattr(
        importlib.import_module(found.module), found.opener
    )
    return opener(io.BytesIO(data), "")


def _check_canvas(data: bytes, limits: DecodeLimits) -> None:
    """Pillow makes room for a WebP's whole canvas, whose size the header VP8X has, as soon as it opens the file."""
    if data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        _check_size(width, height, limits)


def _check_inside(name: str, image: ImageFile.ImageFile, data: bytes, limits: DecodeLimits) -> None:
    """What a small picture may hide that is costly to decode. Raises BadRequestError."""
    if name == "JPEG" and (scans := data.count(_START_OF_SCAN)) > _MAX_JPEG_SCANS:
        raise BadRequestError(
            f"the JPEG picture has {scans} scans, the limit is {_MAX_JPEG_SCANS}; save it anew", code=INVALID_IMAGE
        )
    if name == "TIFF":
        tags = getattr(image, "tag_v2", {})
        width, length = tags.get(_TILE_WIDTH_TAG), tags.get(_TILE_LENGTH_TAG)
        if isinstance(width, int) and isinstance(length, int) and width * length > limits.max_image_pixels:
            tile = f"{width}x{length} = {width * length} pixels"
            raise _too_large(f"TIFF picture of {image.width}x{image.height} pixels with a tile of {tile}", limits)


def _turn_upright(rgb: Image.Image, source: Image.Image) -> Image.Image:
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


def _too_large(what: str, limits: DecodeLimits) -> BadRequestError:
    return BadRequestError(
        f"a {what}; the limit is {limits.max_image_pixels} (setting max_image_pixels)", code="image_too_large"
    )


def _explain_header(name: str, error: Exception) -> str:
    text = _words(error)
    if text == "unknown pixel mode":
        return f"the {name} picture's kind of pixels (bits, sample format, channels) is not supported; 8-bit RGB is"
    if text == "not identified by this driver":
        return f"the {name} picture is broken: its header names no size, or one of no pixels"
    return f"the {name} picture is broken: {text}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
