"""Which video formats are read. The content decides."""

from __future__ import annotations

import re

# Named, never guessed: among FFmpeg's demuxers are playlists, which open other files and addresses.
_FORMATS = (
    ("mov", re.compile(rb"....(ftyp|moov|mdat|wide|free|skip|pnot)", re.DOTALL)),
    ("matroska", re.compile(rb"\x1aE\xdf\xa3")),
    ("gif", re.compile(rb"GIF8[79]a")),
)


def video_format(data: bytes) -> str | None:
    """FFmpeg's name of the format of a file that begins with `data`; None where it is not one that is read."""
    return next((name for name, magic in _FORMATS if magic.match(data)), None)
