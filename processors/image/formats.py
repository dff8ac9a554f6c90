"""Which picture formats there are: the ones that are read, and others that are at least called by their names.

The content's first bytes decide, never a name or a MIME type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from PIL import features

from processors.plain_words import first_bytes
from vlmserve_common.errors import BadRequestError

INVALID_IMAGE = "invalid_image"
"""The error code of a picture that cannot be read."""


@dataclass(frozen=True, slots=True)
class PictureFormat:
    """A format's first bytes, and the Pillow plugin that reads it."""

    name: str
    magic: re.Pattern[bytes]
    module: str
    opener: str


HEAD_BYTES = 4096
"""What says which format a file is of: its text formats may begin with white space, and to follow that through tens of
megabytes would hold Python's lock for seconds."""

# An ISO media file says its brands first: one of its own, then those of others that it agrees with.
_BRANDS = rb"....ftyp(?:....){0,16}?"
_READ = (
    PictureFormat("PNG", re.compile(rb"\x89PNG\r\n\x1a\n"), "PIL.PngImagePlugin", "PngImageFile"),
    PictureFormat("JPEG", re.compile(rb"\xff\xd8\xff"), "PIL.JpegImagePlugin", "jpeg_factory"),
    PictureFormat("WebP", re.compile(rb"RIFF....WEBP", re.DOTALL), "PIL.WebPImagePlugin", "WebPImageFile"),
    PictureFormat("GIF", re.compile(rb"GIF8[79]a"), "PIL.GifImagePlugin", "GifImageFile"),
    PictureFormat("BMP", re.compile(rb"BM"), "PIL.BmpImagePlugin", "BmpImageFile"),
    PictureFormat("TIFF", re.compile(rb"II[*+]\0|MM\0[*+]"), "PIL.TiffImagePlugin", "TiffImageFile"),
    PictureFormat("AVIF", re.compile(_BRANDS + rb"avi[fs]", re.DOTALL), "PIL.AvifImagePlugin", "AvifImageFile"),
)
_OTHER_PICTURES = (
    ("a HEIC picture", re.compile(_BRANDS + rb"he(?:ic|ix|vc|vx|im|is)", re.DOTALL)),
    ("a JPEG 2000 picture", re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51")),
    ("a JPEG XL picture", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ")),
    (
        "an SVG picture",
        re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{0,999}?-->\s*)?(?:<!DOCTYPE )?<?svg\b", re.DOTALL),
    ),
    ("an icon (ICO)", re.compile(rb"\0\0[\1\2]\0")),
    ("a Photoshop file (PSD)", re.compile(rb"8BPS")),
)
_VIDEO_MP4, _VIDEO_WEBM, _VIDEO_AVI = "a video (MP4 or MOV)", "a video (WebM or Matroska)", "a video (AVI)"
_NO_PICTURES = (
    ("a PDF file", re.compile(rb"%PDF-")),
    (_VIDEO_MP4, re.compile(rb"....(?:ftyp|moov)", re.DOTALL)),
    (_VIDEO_WEBM, re.compile(rb"\x1aE\xdf\xa3")),
    (_VIDEO_AVI, re.compile(rb"RIFF....AVI ", re.DOTALL)),
    ("an HTML page", re.compile(rb"\s*<(?:!doctype html|html)", re.IGNORECASE)),
)


def supported_formats() -> tuple[str, ...]:
    """The picture formats that are read; AVIF depends on how this Pillow was built."""
    return tuple(known.name for known in _READ if known.name != "AVIF" or features.check("avif"))


def looks_like_picture(head: bytes) -> bool:
    """Whether a file that begins with `head` (128 bytes will do) is of a picture format that is read here."""
    return format_name(head) is not None


def format_name(head: bytes) -> str | None:
    """The name of its format ("PNG", "JPEG", "WebP" ...), if it is one of those that are read here."""
    return next((known.name for known in _READ if known.magic.match(head)), None)


def looks_like_other_picture(head: bytes) -> bool:
    """Whether it is of a picture format that is known, and not read here."""
    return any(magic.match(head) for _, magic in _OTHER_PICTURES)


def picture_name(head: bytes) -> str | None:
    """What a picture file is called that begins with `head`, whether that format is read here or not; None for what is
    no picture."""
    read = next((_called(known) for known in _READ if known.magic.match(head)), None)
    return read or next((name for name, magic in _OTHER_PICTURES if magic.match(head)), None)


def other_name(head: bytes) -> str | None:
    """The same for what is often sent in the place of a picture."""
    return next((name for name, magic in _NO_PICTURES if magic.match(head)), None)


def picture_format(data: bytes) -> PictureFormat:
    """The format of a picture file. Raises BadRequestError, with the format's name where there is one."""
    if not data:
        raise BadRequestError("the picture is empty (zero bytes)", code=INVALID_IMAGE)
    head = data[:HEAD_BYTES]
    found = next((known for known in _READ if known.magic.match(head)), None)
    supported = supported_formats()
    if found is not None and found.name in supported:
        return found
    name = picture_name(head) or other_name(head)
    if name in (_VIDEO_MP4, _VIDEO_WEBM):
        what = f"the data is {name}, not a picture: send it in a part of type video_url, or video"
        raise BadRequestError(what, code=INVALID_IMAGE)
    readable = f"pictures of the formats {', '.join(supported)} are read"
    if name is not None:
        raise BadRequestError(f"the data is {name}, which is not a supported picture; {readable}", code=INVALID_IMAGE)
    raise BadRequestError(
        f"the data is not a picture of a supported format; {readable}, and it begins with {first_bytes(data)}",
        code=INVALID_IMAGE,
    )


def _called(known: PictureFormat) -> str:
    return f"{'an' if known.name == 'AVIF' else 'a'} {known.name} picture"
