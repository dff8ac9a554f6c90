"""A PNG's chunks (PNG specification, third edition, section 5), counted as Pillow walks through them."""

from __future__ import annotations

import struct

from processors.image.limits import check_count

_HEADER = struct.Struct(">I4s")
_SIGNATURE_BYTES, _CHECKSUM_BYTES = 8, 4

# Pixels come in chunks of 8 KiB from libpng, and of a row from some; an animation has two or more for each frame.
_PIXELS, _MOST_PIXEL_CHUNKS = frozenset((b"IDAT", b"fdAT", b"fcTL")), 2**16
_MOST_OTHERS = 10_000
# Each may become 1 MiB (Pillow's MAX_TEXT_CHUNK).
_COMPRESSED, _MOST_COMPRESSED = frozenset((b"iCCP", b"zTXt", b"iTXt")), 256
_TEXTS, _MOST_TEXT_BYTES = frozenset((b"tEXt", b"zTXt", b"iTXt")), 16 * 2**20
# Eight numbers, by section 11.3.2.1; Pillow makes a Python object of each that there is.
_CHROMATICITIES, _CHROMATICITY_BYTES = b"cHRM", 32


def check_png(data: bytes) -> None:
    """Raises BadRequestError for a PNG of too many chunks or too much text."""
    pixels = others = compressed = text = 0
    at = _SIGNATURE_BYTES
    while at + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, at)
        if kind == b"IEND":
            break
        if kind in _PIXELS:
            pixels += 1
            check_count("PNG", "chunks of pixels", pixels, _MOST_PIXEL_CHUNKS)
        else:
            others += 1
            check_count("PNG", "chunks beside those of pixels", others, _MOST_OTHERS)
        if kind in _COMPRESSED:
            compressed += 1
            check_count("PNG", "chunks of compressed text and profiles", compressed, _MOST_COMPRESSED)
        if kind in _TEXTS:
            text += length
            check_count("PNG", "bytes of text", text, _MOST_TEXT_BYTES)
        if kind == _CHROMATICITIES:
            check_count("PNG", "bytes in its chunk cHRM", length, _CHROMATICITY_BYTES)
        at += _HEADER.size + length + _CHECKSUM_BYTES
