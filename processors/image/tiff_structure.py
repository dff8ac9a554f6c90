"""The directories of TIFFs (TIFF 6.0, section 2; BigTIFF), which Exif data and multi-picture JPEGs have, too.

An entry says where its value stands. Nothing keeps thousands of entries from pointing at the same megabytes, and Pillow
makes a copy for each; and where it takes values apart, it makes an object of a few hundred bytes for each fraction.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from processors.image.limits import check_count

_EXIF_PREFIX = b"Exif\0\0"
_MOST_EXIF_BYTES = 2**20

# Type -> bytes of one value; other types are skipped by Pillow. Of three kinds no numbers are made: BYTE, ASCII,
# UNDEFINED.
_VALUE_BYTES: Mapping[int, int] = MappingProxyType(
    {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
)
_TEXTS = frozenset((1, 2, 7))
_WHOLE: Mapping[int, str] = MappingProxyType({3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q"})

_OFFSETS = frozenset((273, 324))  # StripOffsets, TileOffsets: Pillow makes a decoder for each
_BYTE_COUNTS = frozenset((279, 325))  # which it does not read
_EXIF_DIRECTORY, _GPS_DIRECTORY, _INTEROPERABILITY_DIRECTORY = 34665, 34853, 40965

_MOST_ENTRIES = 4096
_MOST_PARTS = 2**16
# TransferFunction alone may have 3 * 2**16.
_MOST_NUMBERS = 2**18
# Of directories whose values Pillow takes apart, all of them.
_MOST_NUMBERS_READ = 10_000


class _Layout(NamedTuple):
    """How numbers stand in a file: struct's sign of the byte order, and whether it is a BigTIFF."""

    order: str
    big: bool


def check_tiff(data: bytes) -> None:
    """Raises BadRequestError for a TIFF of too many strips or tiles, or with costly directories."""
    layout = _Layout("<" if data[:2] == b"II" else ">", data[2] == 43)  # as Pillow has it; others are refused there
    format, at = ("Q", 8) if layout.big else ("I", 4)
    if len(data) < at + 8:
        return
    (first,) = struct.unpack_from(layout.order + format, data, at)
    pointers = _check_directory("TIFF", data, first, layout, _MOST_NUMBERS)
    _check_inner("TIFF", data, pointers, layout)


def check_exif(format: str, exif: bytes | memoryview, *, inner: bool = False) -> None:
    """Raises BadRequestError for Exif data (CIPA DC-008) that are costly to read. Broken ones pass.

    inner: whether directories that the first one names are read as well, for camera and place.
    """
    check_count(format, "bytes of Exif data", len(exif), _MOST_EXIF_BYTES)
    data = bytes(exif)
    prefixes = 0
    while data.startswith(_EXIF_PREFIX):
        prefixes += 1
        check_count(format, "prefixes of Exif data", prefixes, 2)
        data = data[len(_EXIF_PREFIX) :]
    pointers = check_small_directory(format, data)
    if inner:
        _check_inner(format, data, pointers, _layout(data))


def check_small_directory(format: str, data: bytes) -> Mapping[int, int]:
    """The same of the first directory alone, behind a TIFF header. Gives the numbers that may point to others."""
    if len(data) < 8:
        return {}
    layout = _layout(data)
    (first,) = struct.unpack_from(layout.order + "I", data, 4)
    return _check_directory(format, data, first, layout, _MOST_NUMBERS_READ)


def _layout(data: bytes) -> _Layout:
    return _Layout("<" if data[:2] == b"II" else ">", big=False)


def _check_inner(format: str, data: bytes, pointers: Mapping[int, int], layout: _Layout) -> None:
    """The directories that a first one names."""
    for tag in (_EXIF_DIRECTORY, _GPS_DIRECTORY):
        if tag in pointers:
            inner = _check_directory(format, data, pointers[tag], layout, _MOST_NUMBERS_READ)
            if tag == _EXIF_DIRECTORY and (at := inner.get(_INTEROPERABILITY_DIRECTORY)) is not None:
                _check_directory(format, data, at, layout, _MOST_NUMBERS_READ)


def _check_directory(format: str, data: bytes, at: int, layout: _Layout, most_numbers: int) -> dict[int, int]:
    """Check the directory that begins at `at`. Gives the first number of each tag that has whole ones."""
    head, entry, pointer, inline = ("Q", "HHQ8s", "Q", 8) if layout.big else ("H", "HHI4s", "I", 4)
    head, entry, pointer = layout.order + head, layout.order + entry, layout.order + pointer
    if not 0 <= at <= len(data) - struct.calcsize(head):
        return {}
    start, width = at + struct.calcsize(head), struct.calcsize(entry)
    (count,) = struct.unpack_from(head, data, at)
    count = min(count, (len(data) - start) // width)  # what a broken one says may be anything
    check_count(format, "entries in a directory", count, _MOST_ENTRIES)
    found: dict[int, int] = {}
    numbers = value_bytes = 0
    for entry_at in range(start, start + count * width, width):
        tag, kind, length, value = struct.unpack_from(entry, data, entry_at)
        if kind not in _VALUE_BYTES:
            continue
        size = length * _VALUE_BYTES[kind]
        value_at = entry_at + width - inline
        if size > inline:
            (value_at,) = struct.unpack(pointer, value)
            if value_at + size > len(data):
                break  # Pillow reads no further
            value_bytes += size
            # Values stand side by side in ordinary files, so together they are smaller than the file.
            check_count(format, "bytes of values in a directory", value_bytes, len(data))
        if tag in _OFFSETS:
            check_count(format, "strips or tiles", length, _MOST_PARTS)
        if kind not in _TEXTS and not (most_numbers == _MOST_NUMBERS and tag in _BYTE_COUNTS):
            numbers += length
            check_count(format, "numbers in a directory", numbers, most_numbers)
        if kind in _WHOLE and length:
            (found[tag],) = struct.unpack_from(layout.order + _WHOLE[kind], data, value_at)
    return found
