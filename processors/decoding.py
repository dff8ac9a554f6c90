"""Picture bytes to RGB pixels. The content decides the format, never a name or a MIME type.

Nothing is decoded before its header's size has passed the pixel limit, and Pillow's module-level limits stay alone.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFile, features

from vlmserve.common.errors import BadRequestError

_CODE = "invalid_image"
_ORIENTATION_TAG = 0x0112

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


@dataclass(frozen=True, slots=True)
class _Format:
    """A format's first bytes, and the Pillow plugin that reads it."""

    name: str
    magic: re.Pattern[bytes]
    module: str
    opener: str


_FORMATS = (
    _Format("PNG", re.compile(rb"\x89PNG\r\n\x1a\n"), "PIL.PngImagePlugin", "PngImageFile"),
    _Format("JPEG", re.compile(rb"\xff\xd8\xff"), "PIL.JpegImagePlugin", "jpeg_factory"),
    _Format("WebP", re.compile(rb"RIFF....WEBP", re.DOTALL), "PIL.WebPImagePlugin", "WebPImageFile"),
    _Format("GIF", re.compile(rb"GIF8[79]a"), "PIL.GifImagePlugin", "GifImageFile"),
    _Format("BMP", re.compile(rb"BM"), "PIL.BmpImagePlugin", "BmpImageFile"),
    _Format("TIFF", re.compile(rb"II[*+]\0|MM\0[*+]"), "PIL.TiffImagePlugin", "TiffImageFile"),
    _Format("AVIF", re.compile(rb"....ftypavi[fs]", re.DOTALL), "PIL.AvifImagePlugin", "AvifImageFile"),
)


def supported_formats() -> tuple[str, ...]:
    """The picture formats that this Pillow can read out of those that are allowed."""
    return tuple(f.name for f in _FORMATS if f.name != "AVIF" or features.check("avif"))


def decode_image(data: bytes, limits: DecodeLimits) -> Image.Image:
    """The first picture in `data`: upright by its EXIF orientation, mode RGB, transparency laid on white.

    Raises BadRequestError for anything but a whole picture of an allowed format within the limits.
    """
    if not data:
        raise BadRequestError("the picture is empty (zero bytes)", code=_CODE)
    found = next((f for f in _FORMATS if f.magic.match(data) and f.name in supported_formats()), None)
    if found is None:
        raise BadRequestError(
            f"the data is not a picture of a supported format ({', '.join(supported_formats())}); "
            f"it begins with {data[:8]!r}",
            code=_CODE,
        )
    try:
        image = _open(found, data)
    except Image.DecompressionBombError:  # some plugins ask before we can; Pillow's limit is above any sensible one
        raise BadRequestError(
            f"the {found.name} picture has far more pixels; the limit is {limits.max_image_pixels} "
            "(setting max_image_pixels)",
            code="image_too_large",
        ) from None
    except Exception as error:  # Pillow's plugins raise whatever a broken header makes them stumble over
        raise BadRequestError(f"the {found.name} picture is broken: {_words(error)}", code=_CODE) from error
    check_pixels(image, limits)
    try:
        image.load()
        rgb = to_rgb(image)
    except BadRequestError:
        raise
    except Exception as error:
        raise BadRequestError(f"the {found.name} picture is broken or cut off: {_words(error)}", code=_CODE) from error
    return _turn_upright(rgb, image)


def check_pixels(image: Image.Image, limits: DecodeLimits) -> None:
    """Raises BadRequestError when the picture is larger than the limit. Reads the size only."""
    width, height = image.size
    if width < 1 or height < 1:
        raise BadRequestError(f"the picture has no pixels ({width}x{height})", code=_CODE)
    if width * height > limits.max_image_pixels:
        raise BadRequestError(
            f"a picture of {width}x{height} = {width * height} pixels; the limit is {limits.max_image_pixels} "
            "(setting max_image_pixels)",
            code="image_too_large",
        )


def normalize_image(image: Image.Image, limits: DecodeLimits) -> Image.Image:
    """A picture that came as a Pillow object: limits checked, upright, RGB. Raises BadRequestError."""
    check_pixels(image, limits)
    try:
        image.load()
        return _turn_upright(to_rgb(image), image)
    except BadRequestError:
        raise
    except Exception as error:
        raise BadRequestError(f"the picture cannot be read: {_words(error)}", code=_CODE) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Mode RGB of any picture; alpha and transparent colours are laid on white.

    Like `convert_to_rgb` of transformers' image_transforms, and besides that 16-bit grey is scaled to 8 bits where
    Pillow would cut it off.
    """
    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    if image.mode.startswith("I"):
        return _wide_grey_to_rgb(image)
    if image.mode == "F":
        raise BadRequestError("pictures with floating-point pixels are not supported", code=_CODE)
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        if image.mode in ("La", "RGBa"):  # colours multiplied by alpha
            image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _wide_grey_to_rgb(image: Image.Image) -> Image.Image:
    """16-bit grey (modes I;16*, and I as long as its values fit), 0..65535 to 0..255, rounded."""
    wide = np.asarray(image)
    if wide.min() < 0 or wide.max() > 0xFFFF:
        raise BadRequestError("pictures with more than 16 bits a channel are not supported", code=_CODE)
    grey = np.empty(wide.shape, np.uint8)
    for row, line in zip(grey, wide, strict=True):  # line by line: a whole picture in wider numbers is large
        row[:] = (line.astype(np.int32) + 128) // 257
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[wide == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _open(found: _Format, data: bytes) -> ImageFile.ImageFile:
    """Read the header only. `Image.open` would do, but for its warning about sizes, which is global state."""
    opener: Callable[[io.BytesIO, str], ImageFile.ImageFile] = getattr(
        importlib.import_module(found.module), found.opener
    )
    return opener(io.BytesIO(data), "")


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


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
