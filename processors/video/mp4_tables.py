"""How many frames and samples an MP4 or MOV file's header promises.

FFmpeg makes room for each of them, some 35 bytes, while it opens the file, and a header of two kilobytes can promise
four billion: in tables where all samples have one size (stsz) or no field of their own (trun), by edit lists that show
the same samples over and over (elst), as items (iinf, iloc; ISO/IEC 14496-12, sections 8.6.6, 8.7.3, 8.8.8, 8.11.3 and
8.11.6).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

_MEDIA = frozenset({b"mdat", b"free", b"skip"})  # boxes in which no tables are looked for
_QUICKTIME = frozenset({b"alis", b"url ", b"rsrc"})  # where a track's media are, which is said by a handler, too
_PIECE = 2**20  # bytes searched in one go, which no other thread can interrupt


class CompressedHeaderError(Exception):
    """The header is packed (QuickTime's cmov), and may become any size."""


def promised_entries(data: bytes, most: int) -> int:
    """Of all tracks and fragments together; counting ends above `most`. Raises CompressedHeaderError."""
    total = 0
    for name, start, end in _headers(data):
        total += 1
        # Looked for wherever they are, as FFmpeg finds tables where none should be.
        for entries in _entries(data, start, end, plain_sound=name == b"trak" and _is_plain_sound(data, start, end)):
            total += entries
            if total > most:
                return total
    return total


def _headers(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, start, end) of the file's outermost boxes, but for those of media; of the parts of its header."""
    for name, start, inside, end in _boxes(data, 0, len(data)):
        if name == b"moov":
            rest = inside
            for part, first, _, rest in _boxes(data, inside, end):
                yield part, first, rest
            yield b"", rest, end  # no boxes any more
        elif name not in _MEDIA:
            yield name, start, end


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
    """(name, start, start of what is in it, end) of boxes one after the other."""
    at = start
    while at + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, at)
        head = 8
        if size == 1 and at + 16 <= end:
            (size,), head = struct.unpack_from(">Q", data, at + 8), 16
        stop = at + size if size else end
        if stop < at + head:
            return
        yield name, at, at + head, min(stop, end)
        at = stop


def _entries(data: bytes, start: int, end: int, *, plain_sound: bool) -> Iterator[int]:
    """What each table in there promises, and one for itself. plain_sound: counted by chunks, which take their room."""
    if next(_places(data, b"cmov", start, end), None) is not None:
        raise CompressedHeaderError
    samples = 0
    for name in (b"stsz", b"stz2"):
        for at in _places(data, name, start, end):
            samples = 0 if plain_sound else max(samples, _number(data, at + 12))
            yield 1 + samples
    for at in _places(data, b"elst", start, end):
        yield 1 + max(0, _number(data, at + 8) - 1) * samples
    for at in _places(data, b"trun", start, end):
        yield 1 + _number(data, at + 8)
    for name, place, first_long in ((b"iinf", 8, 1), (b"iloc", 10, 2)):
        for at in _places(data, name, start, end):
            is_long = _number(data, at + 4, 1) >= first_long  # the version
            yield 1 + _number(data, at + place, 4 if is_long else 2)


def _is_plain_sound(data: bytes, start: int, end: int) -> bool:
    """Whether a track is of uncompressed sound, whose samples FFmpeg does not list one by one: as its handler says, and
    its table of times, which has one entry, of one tick a sample."""
    handlers = [data[at + 12 : at + 16] for at in islice(_places(data, b"hdlr", start, end), 4)]
    times = [(_number(data, at + 8), _number(data, at + 16)) for at in islice(_places(data, b"stts", start, end), 2)]
    return b"soun" in handlers and set(handlers) <= {b"soun", *_QUICKTIME} and times == [(1, 1)]


def _number(data: bytes, at: int, size: int = 4) -> int:
    return int.from_bytes(data[at : at + size], "big")


def _places(data: bytes, name: bytes, start: int, end: int) -> Iterator[int]:
    for piece in range(start, end, _PIECE):
        stop = min(piece + _PIECE + len(name) - 1, end)
        at = data.find(name, piece, stop)
        while at >= 0:
            yield at
            at = data.find(name, at + 1, stop)
