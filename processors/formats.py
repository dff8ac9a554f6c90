"""Known file formats: the ones that are read, and others that errors at least call by name.

The content's first bytes decide, never a name or a MIME type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from processors.inputs import Modality

INVALID_IMAGE = "invalid_image"
"""The error code of a picture that cannot be read."""
INVALID_VIDEO = "invalid_video"
"""The error code of a video that cannot be read."""
INVALID_AUDIO = "invalid_audio"
"""The error code of a sound that cannot be read."""

_FORMAT_BYTES = 4096
"""Bytes at a file's start that decide its format.

Text formats can begin with white space. Following that through tens of megabytes would hold Python's lock for seconds.
"""


# An ISO media file starts with its brands: its own, then the compatible ones.
_BRANDS = rb"....ftyp(?:....){0,16}?"
_SVG = rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{0,999}?-->\s*)?(?:<!DOCTYPE )?<?svg\b"
HEAD_BYTES = 128
"""This many first bytes of a file tell a picture from a video."""
_REPR = re.compile(r"""\bb(?P<quote>['"])(?P<inside>.*?)(?P=quote)""")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A file format. `name`: "PNG", or a description for people. `kind`: None for a file that is no medium. `plugin`,
    `opener`: Pillow's, for a format that is read.

    `ffmpeg`: FFmpeg's name of a format that is read as a video or a sound. FFmpeg gets the name and does not guess:
    some of its demuxers are playlists, which open other files and addresses.
    """

    name: str
    magic: re.Pattern[bytes]
    kind: Literal["picture", "video", "sound"] | None = None
    plugin: str | None = None
    opener: str = ""
    ffmpeg: str | None = None

    @property
    def called(self) -> str:
        """The name with its article."""
        if self.plugin is None:
            return self.name
        return f"{'an' if self.name == 'AVIF' else 'a'} {self.name} picture"


def _picture(name: str, magic: bytes, opener: str, ffmpeg: str | None = None) -> FileFormat:
    plugin = f"PIL.{name.capitalize() if name != 'WebP' else name}ImagePlugin"
    return FileFormat(name, re.compile(magic, re.DOTALL), "picture", plugin, opener, ffmpeg)


def _sound(name: str, magic: bytes, ffmpeg: str) -> FileFormat:
    return FileFormat(f"a sound ({name})", re.compile(magic, re.DOTALL), "sound", ffmpeg=ffmpeg)


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
    _sound("WAV", rb"RIFF....WAVE|RF64....WAVE", "wav"),
    _sound("FLAC", rb"fLaC", "flac"),
    _sound("Ogg", rb"OggS", "ogg"),
    _sound("AAC", rb"\xff[\xf0\xf1\xf8\xf9]", "aac"),
    _sound("MP3", rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", "mp3"),
    _sound("M4A", rb"....ftypM4[AB] ", "mov"),
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
    """Return the format of a file that begins with `head`, whether or not it is read here."""
    return next((known for known in _FORMATS if known.magic.match(head[:_FORMAT_BYTES])), None)


def modality_of(head: bytes) -> Modality | None:
    """Return the modality of a file that begins with `head`, None if it is not read here. A GIF is a picture."""
    found = file_format(head)
    if found is None or not (found.plugin or found.kind in ("video", "sound")):
        return None
    return Modality.IMAGE if found.plugin else Modality.VIDEO if found.kind == "video" else Modality.AUDIO


def mime_type(head: bytes) -> str:
    """Return the MIME type of a file that begins with `head`; application/octet-stream if it is not read here."""
    found = file_format(head)
    if found is not None and found.plugin:
        return f"image/{found.name.lower()}"
    if found is not None and found.kind == "video":
        if found.ffmpeg == "mov":
            return "video/quicktime" if head[8:12] == b"qt  " else "video/mp4"
        return "video/webm" if b"webm" in head else "video/x-matroska"
    if found is not None and found.kind == "sound":
        return {"mp3": "audio/mpeg", "mov": "audio/mp4"}.get(str(found.ffmpeg), f"audio/{found.ffmpeg}")
    return "application/octet-stream"


def first_bytes(data: bytes) -> str:
    """Describe the start of a file: text in quotes, or bytes in hexadecimal."""
    head = data[:_SHOWN]
    if head.isascii() and head.decode("ascii").isprintable():
        return f'"{head.decode("ascii")}"'
    return f"the bytes {head.hex(' ')}"


def words(error: Exception) -> str:
    """Return an error's own words, without the quotes that Python puts around bytes. An error without words gives its
    type."""
    return _REPR.sub(r'"\g<inside>"', str(error)) or type(error).__name__
