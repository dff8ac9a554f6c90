"""A WebP's size and chunks (RFC 9649, section 2)."""

from __future__ import annotations

import struct

from processors.image.limits import DecodeLimits, check_count, check_size

_CHUNK = struct.Struct("<4sI")
_FIRST_CHUNK = 12  # behind "RIFF", the file's size and "WEBP"
# libwebp keeps a list of them; each frame of an animation is one.
_MOST_CHUNKS = 2**16


def check_webp(data: bytes, limits: DecodeLimits) -> None:
    """Raises BadRequestError for a WebP that is too large, or has too many chunks.

    Pillow has room made for the whole canvas as soon as it opens a file.
    """
    if (size := _size(data)) is not None:
        check_size(*size, limits)
    count, at = 0, _FIRST_CHUNK
    while at + _CHUNK.size <= len(data):
        count += 1
        check_count("WebP", "chunks", count, _MOST_CHUNKS)
        length = _CHUNK.unpack_from(data, at)[1]
        at += _CHUNK.size + length + length % 2


def _size(data: bytes) -> tuple[int, int] | None:
    """Width and height, in pixels, as the first chunk has them; None where it does not say."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        return None
    if kind == b"VP8X":  # section 2.7: canvas width and height, less one
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8 ":  # RFC 6386, section 9.1: 14 bits each, and two of scaling
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    if kind == b"VP8L":  # section 3.4: 14 bits each, less one
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return None
