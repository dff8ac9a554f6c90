"""Files that someone might send to harm a server, made in memory and the same each time.

Most are small. What they cost a decoder that believes them is said beside each: that server is well which refuses them
within its limits of memory and time.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from tests.processors.clips import make_clip
from tests.processors.helpers import encoded, picture

Kind = Literal["image", "video"]


class NastyFile(NamedTuple):
    """kind: what it is sent as."""

    name: str
    kind: Kind
    data: bytes


def nasty_files() -> list[NastyFile]:
    """All but those that only a limit of time ends."""
    return [*pictures_that_say_they_are_large(), *_structures(), *_clips(), *_other_things()]


def slow_files() -> list[NastyFile]:
    """Pictures of which each would keep a decoder for minutes."""
    return [
        NastyFile("JPEG of 15000 scans over 25 million pixels", "image", jpeg_of_scans(5000, 15_000)),
        NastyFile(
            "GIF with a comment of 24 MB in pieces, which Pillow joins one by one", "image", _gif_comment(94_000)
        ),
    ]


def jpeg_of_scans(side: int, count: int) -> bytes:
    """Each scan takes eleven bytes, and goes over the whole picture."""
    data = encoded(Image.new("L", (side, side), 77), "JPEG", progressive=True)
    return data[:-2] + b"\xff\xda\0\x08\1\1\0\0\0\x10\0" * count + data[-2:]


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def box(name: bytes, *parts: bytes) -> bytes:
    """Of an MP4 file."""
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), name) + body


def pictures_that_say_they_are_large() -> Iterator[NastyFile]:
    yield NastyFile("PNG of 60000x60000", "image", _png_bomb(60_000))
    yield NastyFile("PNG of 1x2000000000", "image", _png_header(1, 2_000_000_000) + png_chunk(b"IEND", b""))
    jpeg = bytearray(encoded(picture(16, 16), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 65500, 65500)
    yield NastyFile("JPEG of 65500x65500", "image", bytes(jpeg))
    yield NastyFile("GIF of 65535x65535", "image", gif(65535, 65535, 1))
    lossless = bytearray(encoded(picture(16, 16), "WEBP", lossless=True))
    at = lossless.index(b"VP8L") + 9
    lossless[at : at + 4] = struct.pack("<I", 16382 | 16382 << 14)
    yield NastyFile("WebP of 16383x16383, 16x16 in truth", "image", bytes(lossless))
    canvas = struct.pack("<I", 0x10)[:4] + (2**24 - 1).to_bytes(3, "little") * 2
    extended = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + encoded(picture(16, 16), "WEBP")[12:]
    webp = b"RIFF" + struct.pack("<I", len(extended)) + extended
    yield NastyFile("WebP whose canvas is of 2**48 pixels", "image", webp)
    avif = encoded(picture(64, 64), "AVIF")
    at = avif.index(b"ispe") + 8
    huge = avif[:at] + struct.pack(">II", 60_000, 60_000) + avif[at + 8 :]
    yield NastyFile("AVIF of 60000x60000, 64x64 in truth", "image", huge)
    bmp = bytearray(encoded(picture(16, 16), "BMP"))
    bmp[18:26] = struct.pack("<ii", -(2**31), 2**31 - 1)
    yield NastyFile("BMP of 2**62 pixels", "image", bytes(bmp))


def _structures() -> Iterator[NastyFile]:
    """What stands beside, or around, a picture's pixels."""
    texts = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 - 1)))
    yield NastyFile("PNG with 500 chunks of 1 MiB text each", "image", _png_with(texts * 500))
    yield NastyFile("PNG with a chunk of no kind behind thousands", "image", _png_with(_EMPTY * 20_000 + b"\0" * 12))
    yield NastyFile("PNG whose chunk ends behind the file", "image", _png_with(struct.pack(">I4s", 2**31 - 1, b"tEXt")))
    overlapping = _directory([(0x100 + n, 7, 2**20, 0) for n in range(60_000)], bytes(2**20))
    yield NastyFile("TIFF of 60000 values of 1 MiB, all at one place", "image", overlapping)
    strips = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1)]
    lying = _directory([*strips, (273, 4, 2**16, 200), (278, 4, 1, 1), (279, 4, 2**16, 200)], bytes(2**18))
    yield NastyFile("TIFF of 65536 strips for 16 rows", "image", lying)
    behind = _directory([*strips, (273, 4, 1, 2**31), (278, 4, 1, 16), (279, 4, 1, 2**32 - 1)], b"")
    yield NastyFile("TIFF whose strip ends behind the file", "image", behind)
    tile = [(322, 4, 1, 2**17), (323, 4, 1, 2**17), (324, 4, 1, 200), (325, 4, 1, 2**32 - 1)]
    yield NastyFile("TIFF of 16x16 with a tile of 2**34 pixels", "image", _directory([*strips, *tile], bytes(99)))
    exif = b"Exif\0\0" + _directory([(0x9000 + n, 7, 60_000, 0) for n in range(400)], b"")
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", 65_535) + exif.ljust(65_533, b"\0") for _ in range(300))
    jpeg = encoded(picture(16, 16), "JPEG")
    yield NastyFile("JPEG with 20 MB of Exif data, cut off", "image", jpeg[:2] + segments + jpeg[2:-40])
    yield NastyFile("JPEG of fill bytes", "image", jpeg[:2] + b"\xff" * 2**20)
    yield NastyFile("run-length coded BMP that ends early", "image", _rle_bmp(7000, 7000))


def _clips() -> Iterator[NastyFile]:
    yield NastyFile("GIF of 50000 frames of 4096x4096", "video", gif(4096, 4096, 50_000))
    yield NastyFile("another one", "video", gif(4095, 4095, 50_000))
    clip = make_clip(12)
    for name, count in (("50 million", 50_000_000), ("170 million", 170_000_000)):
        yield NastyFile(f"MP4 whose stsz promises {name} samples", "video", _of_samples(clip, count))
    edits = box(b"edts", box(b"elst", struct.pack(">II", 0, 60_000), struct.pack(">IIi", 1000, 0, 1 << 16) * 60_000))
    yield NastyFile("MP4 that shows 20000 samples 60000 times", "video", _in_track(_of_samples(clip, 20_000), edits))
    run = box(b"moof", box(b"traf", box(b"tfhd", struct.pack(">II", 0, 1)), box(b"trun", _ALL)))
    yield NastyFile("MP4 whose trun promises four billion samples", "video", clip[: clip.index(b"mdat") - 4] + run)
    packed = box(b"cmov", box(b"dcom", b"zlib"), box(b"cmvd", struct.pack(">I", 2**31), zlib.compress(bytes(2**24))))
    yield NastyFile("MOV with a packed header", "video", box(b"ftyp", b"qt  ", bytes(4)) + box(b"moov", packed))
    nested = b""
    for _ in range(3000):
        nested = box(b"moov", nested)
    yield NastyFile("MP4 of boxes in boxes", "video", box(b"ftyp", b"isom", bytes(4)) + nested)
    webm = make_clip(12, codec="libvpx", container="webm")
    hours = _overwritten(webm, b"\x44\x89\x88", 0, 36e6, layout=">d")
    yield NastyFile("WebM of ten hours", "video", hours)
    yield NastyFile(
        "WebM of an hour, a second in truth", "video", _overwritten(hours, b"\x44\x89\x88", 0, 36e5, layout=">d")
    )
    yield NastyFile("WebM whose clusters are gone", "video", webm[: webm.index(b"\x1f\x43\xb6\x75")])
    yield NastyFile("Matroska that nests without end", "video", b"\x1aE\xdf\xa3\x80" + b"\x18\x53\x80\x67\x01" * 9999)


def _other_things() -> Iterator[NastyFile]:
    """What is something else at the same time, or cut off behind a good head."""
    page = b"<!doctype html><html><script>alert(1)</script>"
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    whole = encoded(picture(40, 30))
    noise = np.random.default_rng(1).bytes(200_000)
    yield NastyFile("HLS", "video", playlist)
    yield NastyFile("EPS", "image", b"%!PS-Adobe-3.0 EPSF-3.0\n{1 1}loop\n")
    yield NastyFile("a GIF that is a playlist", "video", b"GIF89a/*" + playlist)
    yield NastyFile("an MP4 that is a playlist", "video", b"\0\0\0\x08free" + playlist)
    yield NastyFile("a GIF that is a script", "image", b"GIF89a/*\0\0" + page + b"*/=1;")
    yield NastyFile("a PNG that is a page", "image", whole[:33] + page + whole[33:])
    yield NastyFile("an AVIF of noise", "image", b"\0\0\0\x1cftypavif" + noise)
    yield NastyFile("an MP4 of noise", "video", b"\0\0\0\x18ftypmp42" + noise)


_ALL = struct.pack(">II", 0, 2**32 - 1)  # version and flags, and a number of entries
_EMPTY = png_chunk(b"prIv", b"")


def _png_header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))


def _png_bomb(side: int) -> bytes:
    return _png_header(side, side) + png_chunk(b"IDAT", zlib.compress(bytes(2**24), 9)) + png_chunk(b"IEND", b"")


def _png_with(chunks: bytes) -> bytes:
    whole = encoded(picture(40, 30))
    return whole[:33] + chunks + whole[33:]


def gif(width: int, height: int, frames: int) -> bytes:
    """Each frame paints one pixel and takes 23 bytes."""
    frame = b"\x21\xf9\4\0\2\0\0\0" + b"\x2c\0\0\0\0\1\0\1\0\0" + b"\2\2\x44\1\0"
    head = b"GIF89a" + struct.pack("<HH", width, height) + b"\xf0\0\0" + b"\0\0\0\xff\xff\xff"
    return head + frame * frames + b";"


def _gif_comment(blocks: int) -> bytes:
    whole = gif(16, 16, 1)
    return whole[:19] + b"\x21\xfe" + (b"\xff" + bytes(255)) * blocks + b"\0" + whole[19:]


def _directory(entries: list[tuple[int, int, int, int]], behind: bytes) -> bytes:
    """A TIFF of one directory of (tag, type, count, value or place)."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4) + behind


def _rle_bmp(width: int, height: int) -> bytes:
    """Pillow decodes it byte by byte, in Python; its pixels are far from all there."""
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 2**20, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + bytes(1024) + b"\1\1" * 2**19


def _overwritten(data: bytes, mark: bytes, offset: int, *values: float, layout: str = "") -> bytes:
    """`data` with numbers put `offset` bytes behind `mark`."""
    changed = bytearray(data)
    struct.pack_into(layout or f">{len(values)}I", changed, data.index(mark) + len(mark) + offset, *values)
    return bytes(changed)


def _of_samples(clip: bytes, count: int) -> bytes:
    """With so many of one byte, which takes no more room than one of them does."""
    return _overwritten(_overwritten(clip, b"stsz", 4, 1, count), b"stsc", 12, count)


def _in_track(clip: bytes, more: bytes) -> bytes:
    """With a box at the end of its only track, whose media come before it."""
    changed = bytearray(clip)
    for name in (b"moov", b"trak"):
        at = clip.index(name) - 4
        struct.pack_into(">I", changed, at, int.from_bytes(clip[at : at + 4], "big") + len(more))
    end = clip.index(b"trak") - 4 + int.from_bytes(clip[clip.index(b"trak") - 4 : clip.index(b"trak")], "big")
    return bytes(changed[:end]) + more + bytes(changed[end:])
