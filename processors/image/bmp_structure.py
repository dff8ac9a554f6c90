"""Run-length coded BMPs, which Pillow decodes in Python: byte by byte, and in places pixel by pixel."""

from __future__ import annotations

import struct

from processors.image.limits import check_count

# BITMAPFILEHEADER of 14 bytes, then BITMAPINFOHEADER: its own size, width, height, planes, bits, compression.
_HEADER = struct.Struct("<14xIiiHHI")
_RUN_LENGTHS = (1, 2)  # BI_RLE8, BI_RLE4
_MOST = 2**23
"""Pixels, and bytes, of one: a screen of 3840x2160 has fewer, and they take about a second."""


def check_bmp(data: bytes) -> None:
    """Raises BadRequestError for a run-length coded BMP that would take long to decode."""
    if len(data) < _HEADER.size:
        return
    size, width, height, _, _, compression = _HEADER.unpack_from(data)
    if size >= 40 and compression in _RUN_LENGTHS:
        check_count("BMP", "run-length coded pixels", abs(width * height), _MOST)
        check_count("BMP", "bytes of run lengths", len(data), _MOST)
