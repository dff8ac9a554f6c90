"""A JPEG's segments (ITU-T T.81, annex B), counted up to the picture's end.

What follows it is none of the picture's: a phone's motion photo has a whole video there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from processors.image.limits import check_count
from processors.image.tiff_structure import check_exif, check_small_directory

_FIRST_SEGMENT = 2  # behind SOI
# A marker is 0xff, any number of times, and a byte that is neither 0 nor 0xff (B.1.1.2). Within a scan 0xff 0 is a
# byte of pixels, and RST0 to RST7 stand between them.
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_PIECE_BYTES = 2**20  # searching holds Python's lock: a millisecond or so for each

# Pillow hands libjpeg what it has so far, again and with more behind it, as long as the next marker is not there.
_MOST_FILL = 4096
_TOO_MUCH_FILL = b"\xff" * (_MOST_FILL + 1)

_SOS, _EOI, _DQT, _TEM = 0xDA, 0xD9, 0xDB, 0x01
_APP1, _APP2, _APP13 = 0xE1, 0xE2, 0xED
_EXIF, _MPF = b"Exif\0\0", b"MPF\0"
_FRAMES = frozenset({*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC})
_WITHOUT_LENGTH = frozenset({_TEM, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})

_MOST_SEGMENTS = 10_000
# A progressive JPEG has about ten. Each costs a pass over the whole picture, and takes no more than eleven bytes.
_MOST_SCANS = 200
# Pillow skips them one by one.
_MOST_SKIPPED = 64 * 2**10
# Of those before the first scan, which Pillow reads in Python: their names, and the most bytes of them together.
_MOST_BYTES: Mapping[int, tuple[str, int]] = MappingProxyType(
    {
        _DQT: ("quantization tables", 64 * 2**10),
        _APP13: ("Photoshop resources", 4 * 2**20),
        **dict.fromkeys(_FRAMES, ("frame headers", 1024)),
    }
)
# Pillow joins them one by one: it copies what it has for each.
_MOST_EXIF_SEGMENTS, _MOST_EXIF_BYTES = 100, 2**20


def check_jpeg(data: bytes) -> None:
    """Raises BadRequestError for a JPEG of too many segments or scans, or too much Exif data."""
    segments = scans = skipped = 0
    sizes: Counter[str] = Counter()
    exif: list[bytes] = []
    several: bytes | None = None  # index of a multi-picture file (CIPA DC-007)
    at = _FIRST_SEGMENT
    while (found := _next_marker(data, at, in_scan=scans > 0)) is not None:
        segments += 1
        check_count("JPEG", "segments", segments, _MOST_SEGMENTS)
        if scans == 0:
            skipped += found - at
            check_count("JPEG", "bytes between its segments", skipped, _MOST_SKIPPED)
        marker = data[found + 1]
        if scans and marker == _EOI:  # Pillow reads on after one before the first scan
            return
        if marker in _WITHOUT_LENGTH:
            at = found + 2
            continue
        length = int.from_bytes(data[found + 2 : found + 4], "big")
        at = found + 2 + max(2, length)
        if marker == _SOS:
            scans += 1
            check_count("JPEG", "scans", scans, _MOST_SCANS)
            if scans == 1:  # so far Pillow reads; libjpeg, which reads all of it, does so without Python's lock
                check_exif("JPEG", b"".join(exif))
                check_small_directory("JPEG", several or b"")
        elif scans == 0:
            if marker in _MOST_BYTES:
                what, most = _MOST_BYTES[marker]
                sizes[what] += length
                check_count("JPEG", f"bytes of {what}", sizes[what], most)
            elif marker == _APP1 and data.startswith(_EXIF, found + 4):
                exif.append(data[found + 4 + (len(_EXIF) if exif else 0) : at])
                sizes["Exif"] += length
                check_count("JPEG", "segments of Exif data", len(exif), _MOST_EXIF_SEGMENTS)
                check_count("JPEG", "bytes of Exif data", sizes["Exif"], _MOST_EXIF_BYTES)
            elif marker == _APP2 and data.startswith(_MPF, found + 4):
                several = data[found + 4 + len(_MPF) : at]
    if scans == 0:
        check_count("JPEG", "bytes between its segments", skipped + max(0, len(data) - at), _MOST_SKIPPED)


def _next_marker(data: bytes, at: int, *, in_scan: bool) -> int | None:
    """Where the next marker's 0xff stands, from `at` on; None where there is none. Raises BadRequestError."""
    pattern = _MARKER_IN_SCAN if in_scan else _MARKER
    for start in range(at, len(data), _PIECE_BYTES):
        found = pattern.search(data, start, start + _PIECE_BYTES + 1)
        end = found.start() if found else start + _PIECE_BYTES + len(_TOO_MUCH_FILL)
        if in_scan and data.find(_TOO_MUCH_FILL, start, end) >= 0:
            check_count("JPEG", "or more fill bytes in a row", len(_TOO_MUCH_FILL), _MOST_FILL)
        if found:
            return found.start()
    return None
