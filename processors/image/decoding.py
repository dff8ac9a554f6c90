"""Picture bytes to RGB pixels.

Pillow opens a file once its structure is known to be that of an ordinary one, and decodes it once the header's size has
passed the limits. Pillow's module-level limits stay alone.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable

from PIL import Image, ImageFile

from processors.image.formats import INVALID_IMAGE, PictureFormat, picture_format
from processors.image.limits import DecodeLimits, check_size, too_large
from processors.image.orientation import turn_upright
from processors.image.picture_structure import check_structure
from processors.image.rgb import to_rgb
from processors.plain_words import words
from vlmserve_common.errors import BadRequestError

_TILE_WIDTH_TAG, _TILE_LENGTH_TAG = 322, 323
_MOST_LAYERS = 2  # how often strips may cover a picture: some files have a few too many of them


def decode_image(data: bytes, limits: DecodeLimits) -> Image.Image:
    """The first picture in `data`: upright by its EXIF orientation, mode RGB, transparency laid on white.

    Raises BadRequestError for anything but a whole picture of a supported format within the limits.
    """
    found = picture_format(data)
    check_structure(found.name, data, limits)
    try:
        image = _open(found, data)
    except Image.DecompressionBombError as error:  # some plugins ask before we can, with Pillow's limit
        size = re.search(r"\d+", str(error))
        raise too_large(f"{found.name} picture of {size.group() if size else 'far more'} pixels", limits) from None
    except Exception as error:  # Pillow's plugins raise whatever a broken header makes them stumble over
        raise BadRequestError(_explain_header(found.name, error), code=INVALID_IMAGE) from error
    check_pixels(image, limits)
    _check_inside(found.name, image, limits)
    try:
        image.load()
        rgb = to_rgb(image)
    except BadRequestError:
        raise
    except Exception as error:
        raise BadRequestError(
            f"the {found.name} picture is broken or cut off: {words(error)}", code=INVALID_IMAGE
        ) from error
    return turn_upright(rgb, image)


def check_pixels(image: Image.Image, limits: DecodeLimits) -> None:
    """Raises BadRequestError when the picture is larger than the limit. Reads the size only."""
    check_size(*image.size, limits)


def normalize_image(image: Image.Image, limits: DecodeLimits) -> Image.Image:
    """A picture that came as a Pillow object: limits checked, upright, RGB. Raises BadRequestError."""
    check_pixels(image, limits)
    try:
        image.load()
        return turn_upright(to_rgb(image), image)
    except BadRequestError:
        raise
    except Exception as error:
        raise BadRequestError(f"the picture cannot be read: {words(error)}", code=INVALID_IMAGE) from error


def _open(found: PictureFormat, data: bytes) -> ImageFile.ImageFile:
    """Read the header only. `Image.open` would do, but for its warning about sizes, which is global state."""
    opener: Callable[[io.BytesIO, str], ImageFile.ImageFile] = getattr(
        importlib.import_module(found.module), found.opener
    )
    return opener(io.BytesIO(data), "")


def _check_inside(name: str, image: ImageFile.ImageFile, limits: DecodeLimits) -> None:
    """What a small TIFF may hide that is costly to decode. Raises BadRequestError."""
    if name != "TIFF":
        return
    tags = getattr(image, "tag_v2", {})
    width, length = tags.get(_TILE_WIDTH_TAG), tags.get(_TILE_LENGTH_TAG)
    if isinstance(width, int) and isinstance(length, int) and width * length > limits.max_image_pixels:
        tile = f"{width}x{length} = {width * length} pixels"
        raise too_large(f"TIFF picture of {image.width}x{image.height} pixels with a tile of {tile}", limits)
    # Each strip or tile is decoded, also where it lies on top of another.
    boxes = [tile.extents for tile in image.tile if tile.extents is not None]
    covered = sum((right - left) * (lower - upper) for left, upper, right, lower in boxes)
    if covered > _MOST_LAYERS * image.width * image.height * len(image.getbands()):
        what = f"{len(boxes)} strips or tiles, which its {image.width}x{image.height} pixels have no place for"
        raise BadRequestError(f"the TIFF picture is broken: it has {what}", code=INVALID_IMAGE)


def _explain_header(name: str, error: Exception) -> str:
    text = words(error)
    if text == "unknown pixel mode":
        return f"the {name} picture's kind of pixels (bits, sample format, channels) is not supported; 8-bit RGB is"
    if text == "not identified by this driver":
        return f"the {name} picture is broken: its header names no size, or one of no pixels"
    return f"the {name} picture is broken: {text}"
