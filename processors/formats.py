"""Which file formats there are: the ones that are read, and others that are at least called by their names.

The content's first bytes decide, never a name or a MIME type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

INVALID_IMAGE = "invalid_image"
"""The error code of a picture that cannot be read."""
INVALID_VIDEO = "invalid_video"
"""The error code of a video that cannot be read."""

HEAD_BYTES = 4096
"""What says which format a file is of: its text formats may begin with white space, and to follow that through tens of
megabytes would hold Python's lock for seconds."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """name: "PNG", or what it is to people. kind: None for what is neither. plugin, opener: Pillow's, for what is read.

    ffmpeg: FFmpeg's name of a format that is read as a video. It is given, never guessed: among FFmpeg's demuxers are
    playlists, which open other files and addresses.
    """

    name: str
    magic: re.Pattern[bytes]
    kind: Literal["picture", "video"] | None = None
    plugin: str | None = None
    opener: str = ""
    ffmpeg: str | None = None

    @property
    def called(self) -> str:
        """With its article."""
        if self.plugin is None:
            return self.name
        return f"{'an' if self.name == 'AVIF' else 'a'} {self.name} picture"


def _picture(name: str, magic: bytes, opener: str, ffmpeg: str | None = None) -> FileFormat:
    plugin = f"PIL.{name.capitalize() if name != 'WebP' else name}ImagePlugin"
    return FileFormat(name, re.compile(magic, re.DOTALL), "picture", plugin, opener, ffmpeg)


# An ISO media file says its brands first: one of its own, then those of others that it agrees with.
_BRANDS = rb"....ftyp(?:....){0,16}?"
_SVG = rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{0,999}?-->\s*)?(?:<!DOCTYPE )?<?svg\b"
_FORMATS = (
    _picture("PNG", rb"\x89PNG\r\n\x1a\n", "PngImageFile"),
    _picture("JPEG", rb"\xff\xd8\xff", "jpeg_factory"),
    _picture("WebP", rb"RIFF....WEBP", "WebPImageFile"),
    _picture("GIF", rb"GIF8[79]a", "GifImageFile", ffmpeg="gif"),
    _picture("BMP", rb"BM", "BmpImageFile"),
    _picture("TIFF", rb"II[*+]\0|MM\0[*+]", "TiffImageFile"),
    _picture("AVIF", _BRANDS + rb"avi[fs]", "AvifImageFile", ffmpeg="mov"),
    FileFormat("a HEIC picture", re.compile(_BRANDS + rb"he(?:ic|ix|vc|vx|im|is)", re.DOTALL), "picture", ffmpeg="mov"),
    FileFormat("a JPEG 2000 picture", re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"), "picture"),
    FileFormat("a JPEG XL picture", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "), "picture"),
    FileFormat("an SVG picture", re.compile(_SVG, re.DOTALL), "picture"),
    FileFormat("an icon (ICO)", re.compile(rb"\0\0[\1\2]\0"), "picture"),
    FileFormat("a Photoshop file (PSD)", re.compile(rb"8BPS"), "picture"),
    FileFormat(
        "a video (MP4 or MOV)",
        re.compile(rb"....(?:ftyp|moov|mdat|wide|free|skip|pnot)", re.DOTALL),
        "video",
        ffmpeg="mov",
    ),
    FileFormat("a video (WebM or Matroska)", re.compile(rb"\x1aE\xdf\xa3"), "video", ffmpeg="matroska"),
    FileFormat("a video (AVI)", re.compile(rb"RIFF....AVI ", re.DOTALL)),
    FileFormat("a PDF file", re.compile(rb"%PDF-")),
    FileFormat("an HTML page", re.compile(rb"\s*<(?:!doctype html|html)", re.IGNORECASE)),
)


def file_format(head: bytes) -> FileFormat | None:
    """The format of a file that begins with `head`, whether it is read here or not."""
    return next((known for known in _FORMATS if known.magic.match(head[:HEAD_BYTES])), None)
