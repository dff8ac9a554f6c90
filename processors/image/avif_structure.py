"""An AVIF's pictures and their true sizes (ISO/IEC 14496-12 for the boxes, 23008-12 for items, AV1 ISOBMFF for tracks).

The file says how large a picture is (`ispe`), and so does the AV1 data that it is decoded from. Where they differ the
decoder makes the larger one, and scales: what counts is what stands in the data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from processors.image.av1_sizes import FrameSizes, av1_units
from processors.image.formats import INVALID_IMAGE
from processors.image.limits import DecodeLimits, check_count, check_size
from processors.image.tiff_structure import check_exif
from vlmserve_common.errors import BadRequestError

_CONTAINERS = frozenset((b"moov", b"trak", b"mdia", b"minf", b"stbl"))
_MOST_BOXES = 10_000
# A picture put together from others has up to 256 x 256 of them by its format; the decoder looks each up in a list.
_MOST_ITEMS = 4096
# Of all AV1 frames together, as multiples of the largest picture: colours and alpha, of an item and of a track.
_LARGEST_PICTURES = 4
_MOST_UNITS = 10_000


class _Box(NamedTuple):
    """at, end: where its content begins and ends in the file."""

    kind: bytes
    at: int
    end: int


class _Meta(NamedTuple):
    """What a meta box says: types of items, and their pieces: construction method, start and length in bytes."""

    kinds: dict[int, bytes]
    places: dict[int, tuple[int, list[tuple[int, int]]]]
    inner_data: int  # where idat begins, for items of construction method 1


def check_avif(data: bytes, limits: DecodeLimits) -> None:
    """Raises BadRequestError for an AVIF whose AV1 data cannot be found, or are of larger pictures than allowed."""
    try:
        if not _check_frames(_coded_pictures(data), limits):
            raise ValueError("it has no AV1 frame")
    except (ValueError, struct.error, IndexError) as error:
        raise BadRequestError(
            f"the AVIF picture is broken: its AV1 frames' size cannot be read ({error})", code=INVALID_IMAGE
        ) from None


def _check_frames(pictures: Iterator[memoryview], limits: DecodeLimits) -> int:
    """Gives the number of frames."""
    frames = units = pixels = 0
    for picture in pictures:
        sizes = FrameSizes()
        for unit in av1_units(picture):
            units += 1
            check_count("AVIF", "units of AV1 data", units, _MOST_UNITS)
            size = sizes.size(unit)
            if size is None:
                continue
            check_size(*size, limits, "AVIF picture with an AV1 frame")
            frames += 1
            pixels += size[0] * size[1]
            check_count("AVIF", "pixels in AV1 frames", pixels, _LARGEST_PICTURES * limits.max_image_pixels)
    return frames


def _coded_pictures(data: bytes) -> Iterator[memoryview]:
    """The AV1 data of all items, and of each track's first sample: nothing else is decoded for a first picture."""
    boxes = 0
    todo = [_Box(b"", 0, len(data))]
    while todo:
        outer = todo.pop()
        children: dict[bytes, _Box] = {}
        for box in _boxes(data, outer.at, outer.end):
            boxes += 1
            check_count("AVIF", "boxes", boxes, _MOST_BOXES)
            if outer.kind == b"stbl" and box.kind in children:
                raise ValueError("a track with two tables of a kind")
            children[box.kind] = box
            if box.kind in _CONTAINERS:
                todo.append(box)
            elif box.kind == b"meta":
                yield from _items(data, box)
        if b"stsd" in children:
            samples = children[b"stsd"]
            if any(entry.kind == b"av01" for entry in _boxes(data, samples.at + 8, samples.end)):
                yield _first_sample(data, children)


def _boxes(data: bytes, at: int, end: int) -> Iterator[_Box]:
    """The boxes between two places (14496-12, section 4.2). Broken ones end it: the decoder says so."""
    while at + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, at)
        head = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
            head = 16
        elif size == 0:
            size = end - at
        if size < head or at + size > end:
            return
        yield _Box(kind, at + head, at + size)
        at += size


def _first_sample(data: bytes, tables: dict[bytes, _Box]) -> memoryview:
    """A track's first sample (14496-12, section 8.7): sizes in stsz, chunks in stco or co64."""
    places = [tables[kind] for kind in (b"stco", b"co64") if kind in tables]
    if b"stsz" not in tables or len(places) != 1:
        raise ValueError("a track without its samples' places")
    size, _, first_size = struct.unpack_from(">4xIII", data, tables[b"stsz"].at)
    (at,) = struct.unpack_from(">8xI" if b"stco" in tables else ">8xQ", data, places[0].at)
    return memoryview(data)[at : at + (size or first_size)]


def _items(data: bytes, meta: _Box) -> Iterator[memoryview]:
    """The AV1 data of a meta box's items; Exif items are looked at as well."""
    found = _read_meta(data, meta)
    view = memoryview(data)
    copied = 0
    for item, kind in found.kinds.items():
        if kind not in (b"av01", b"Exif") or item not in found.places:
            continue
        method, pieces = found.places[item]
        if method > 1:
            raise ValueError(f"an item of construction method {method}")
        start = found.inner_data if method == 1 else 0
        parts = [view[start + at : start + at + size if size else None] for at, size in pieces]
        if len(parts) != 1:  # put together, by the decoder too, with the same bytes as often as they are named
            copied += sum(map(len, parts))
            check_count("AVIF", "bytes in items of several pieces", copied, len(data))
            parts = [memoryview(b"".join(parts))]
        if kind == b"av01":
            yield parts[0]
        else:  # behind exif_tiff_header_offset (23008-12, annex A)
            check_exif("AVIF", parts[0][4:], inner=True)  # Pillow writes them anew where `irot` turns the picture


def _read_meta(data: bytes, meta: _Box) -> _Meta:
    found = _Meta({}, {}, 0)
    for box in _boxes(data, meta.at + 4, meta.end):
        if box.kind == b"iinf":
            for entry in _boxes(data, box.at + (6 if data[box.at] == 0 else 8), box.end):
                # infe of version 2 or 3: item_ID of 2 or 4 bytes, protection index, type
                format = ">4xIH4s" if data[entry.at] > 2 else ">4xHH4s"
                item, _, kind = struct.unpack_from(format, data, entry.at)
                if item in found.kinds:
                    raise ValueError(f"two items {item}")
                found.kinds[item] = kind
                check_count("AVIF", "items", len(found.kinds), _MOST_ITEMS)
        elif box.kind == b"iloc":
            _read_places(data, box, found.places)
        elif box.kind == b"idat":
            found = found._replace(inner_data=box.at)
    return found


def _read_places(data: bytes, box: _Box, places: dict[int, tuple[int, list[tuple[int, int]]]]) -> None:
    """ItemLocationBox, 14496-12 section 8.11.3."""
    at = box.at

    def number(width: int) -> int:
        nonlocal at
        at += width
        if at > box.end:
            raise ValueError("the box iloc is cut off")
        return int.from_bytes(data[at - width : at], "big")

    version = number(4) >> 24
    widths = number(2)
    offset_width, length_width, base_width = widths >> 12, widths >> 8 & 15, widths >> 4 & 15
    index_width = widths & 15 if version else 0
    pieces_seen = 0
    items = number(4 if version == 2 else 2)
    check_count("AVIF", "items", items, _MOST_ITEMS)
    for _ in range(items):
        item = number(4 if version == 2 else 2)
        method = number(2) & 15 if version else 0
        number(2)  # data_reference_index
        base = number(base_width)
        pieces: list[tuple[int, int]] = []
        for _ in range(number(2)):
            pieces_seen += 1
            check_count("AVIF", "pieces of items", pieces_seen, _MOST_BOXES)
            number(index_width)
            pieces.append((base + number(offset_width), number(length_width)))
        if item in places:
            raise ValueError(f"two places of item {item}")
        places[item] = (method, pieces)
