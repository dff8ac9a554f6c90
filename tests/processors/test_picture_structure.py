"""Files whose structure is costly to open are refused before Pillow opens them; ordinary and odd ones are not."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin, TiffImagePlugin

from processors.image import decoding
from processors.image.decoding import decode_image, normalize_image
from tests.processors.helpers import encoded, noise, picture
from tests.processors.test_decoding import FILES, LIMITS, animation, exif, png_chunk
from tests.processors.test_picture_kinds import edited, greys, pixels, refused, tiff

JPEG = encoded(picture(40, 30), "JPEG")
PROGRESSIVE = encoded(Image.new("L", (64, 64), 77), "JPEG", progressive=True)
PNG = encoded(picture(40, 30))
GIF = encoded(picture(40, 30).quantize(8), "GIF")
WEBP = encoded(picture(40, 30), "WEBP")


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def in_jpeg(*segments: bytes, file: bytes = JPEG) -> bytes:
    return file[:2] + b"".join(segments) + file[2:]


def in_png(*chunks: bytes, file: bytes = PNG, before: bytes = b"IDAT") -> bytes:
    at = file.index(before) - 4
    return file[:at] + b"".join(chunks) + file[at:]


def in_gif(*blocks: bytes, file: bytes = GIF) -> bytes:
    at = 13 + (3 << (file[10] & 7) + 1)
    return file[:at] + b"".join(blocks) + file[at:]


def sub_blocks(data: bytes, size: int = 255) -> bytes:
    parts = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


def in_webp(*chunks: tuple[bytes, bytes]) -> bytes:
    """As an extended file: with a canvas, then the pixels, then these."""
    canvas = bytes(4) + (39).to_bytes(3, "little") + (29).to_bytes(3, "little")
    more = b"".join(kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2) for kind, body in chunks)
    content = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + canvas + WEBP[12:] + more
    return b"RIFF" + struct.pack("<I", len(content)) + content


def directory(*entries: tuple[int, int, int, int], prefix: bytes = b"") -> bytes:
    """A TIFF header and a directory of (tag, type, count, value or place)."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return prefix + b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


SHORT, LONG, RATIONAL, UNDEFINED = 3, 4, 5, 7
EXIF_PREFIX = b"Exif\0\0"
# All values in one place: a copy is made of each.
OVERLAPPING = directory(*((0x9000 + n, UNDEFINED, 3000, 0) for n in range(400)))
# The place of another directory, of fractions.
FRACTIONS = directory((34665, LONG, 1, 26)) + struct.pack("<HHHII", 1, 0x9000, RATIONAL, 10_001, 64) + bytes(80_100)
MANY = directory((0x9000, RATIONAL, 10_001, 26)) + bytes(80_100)
INNER = struct.pack("<HHHII", 1, 0x9000, SHORT, 10_001, 64)
SAME_SIZE = directory((0x0100, SHORT, 1, 1)) + b"x" * (len(FRACTIONS) - 26)


def rle_bmp(width: int, height: int, data: bytes, compression: int = 1) -> bytes:
    palette = bytes(range(256)) * 4
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + palette + data


COMMENTS = b"!\xfe\0" * 10_001

COSTLY = {
    "jpeg, empty segments": (in_jpeg(segment(0xE0, b"") * 10_000), "100.. segments, the limit is 10000"),
    "jpeg, markers": (in_jpeg(b"\xff\xd0" * 10_001), "segments, the limit is 10000"),
    "jpeg, segments after a first end": (in_jpeg(b"\xff\xd9", segment(0xE0, b"") * 10_001), "segments, the limit"),
    "jpeg, exif in pieces": (in_jpeg(segment(0xE1, EXIF_PREFIX + b"abcd") * 101), "101 segments of Exif data"),
    "jpeg, exif": (in_jpeg(segment(0xE1, EXIF_PREFIX + bytes(65_000)) * 17), "bytes of Exif data, the limit is 1048"),
    "jpeg, exif directory": (in_jpeg(segment(0xE1, EXIF_PREFIX + OVERLAPPING)), "bytes of values in a directory"),
    "jpeg, exif directory in pieces": (
        in_jpeg(*(segment(0xE1, EXIF_PREFIX + part) for part in (MANY[:20], MANY[20:50_000], MANY[50_000:]))),
        "numbers in a directory",
    ),
    "jpeg, exif prefixes": (in_jpeg(segment(0xE1, EXIF_PREFIX * 3 + OVERLAPPING)), "prefixes of Exif"),
    "jpeg, several pictures": (in_jpeg(segment(0xE2, b"MPF\0" + OVERLAPPING)), "bytes of values in a directory"),
    "jpeg, no segments": (in_jpeg(b"\xff\xd9" + bytes(70_000)), "bytes between its segments, the limit is 65536"),
    "jpeg, nothing more": (b"\xff\xd8\xff" + bytes(70_000), "bytes between its segments"),
    "jpeg, fill bytes": (in_jpeg(b"\xff" * 70_000), "bytes between its segments"),
    "jpeg, fill bytes in a scan": (JPEG[:-2] + b"\xff" * 5000 + JPEG[-2:], "4097 or more fill bytes in a row"),
    "jpeg, fill bytes at the end": (JPEG[:-2] + bytes(2**20 - 999) + b"\xff" * 9000, "fill bytes in a row"),
    "jpeg, frames": (in_jpeg(segment(0xC0, bytes(400)) * 3), "bytes of frame headers, the limit is 1024"),
    "jpeg, tables": (in_jpeg(segment(0xDB, bytes(65)) * 1000), "bytes of quantization tables, the limit is 65536"),
    "jpeg, photoshop": (in_jpeg(segment(0xED, bytes(65_000)) * 70), "bytes of Photoshop resources"),
    "png, private chunks": (in_png(png_chunk(b"prIv", b"") * 10_000), "chunks beside those of pixels, the limit is"),
    "png, pixel chunks": (in_png(png_chunk(b"IDAT", b"") * 2**16), "65537 chunks of pixels, the limit is 65536"),
    "png, behind the pixels": (in_png(png_chunk(b"prIv", b"") * 10_000, before=b"IEND"), "chunks beside"),
    "png, compressed text": (in_png(png_chunk(b"zTXt", b"\0\0" + zlib.compress(b"")) * 257), "257 chunks of compr"),
    "png, text": (in_png(png_chunk(b"tEXt", b"a\0" + bytes(2**20)) * 17), "bytes of text, the limit is 16777216"),
    "png, chromaticities": (in_png(png_chunk(b"cHRM", bytes(36))), "36 bytes in its chunk cHRM, the limit is 32"),
    "png, exif directory": (in_png(png_chunk(b"eXIf", OVERLAPPING)), "bytes of values in a directory"),
    "png, exif as text": (
        in_png(png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n1\n" + OVERLAPPING.hex().encode())),
        "bytes of values in a directory",
    ),
    "gif, comment": (in_gif(b"!\xfe" + sub_blocks(bytes(300_000))), "bytes of comments, the limit is 262144"),
    "gif, comment in pieces": (in_gif(b"!\xfe" + sub_blocks(bytes(30_000), 3)), "10001 blocks of comments"),
    "gif, empty comments": (in_gif(COMMENTS), "10001 blocks of comments"),
    "gif, extensions": (in_gif(b"!\xff" + sub_blocks(bytes(2**17), 1)), "blocks before its first picture"),
    "gif, nothing known": (in_gif(bytes(2**17 + 1)), "blocks before its first picture, the limit is 131072"),
    "gif, behind an end that is none": (in_gif(b"!\xff\0" + b"\1,\0" + COMMENTS), "10001 blocks of comments"),
    "gif, behind another": (in_gif(b"!\xff\x0bNETSCAPE2.0\0" + b"\1,\0" + COMMENTS), "10001 blocks of comments"),
    "webp, chunks": (in_webp(*[(b"none", b"")] * 2**16), "chunks, the limit is 65536"),
    "webp, exif directory": (
        (lambda data: edited(data, 20, "B", 8))(in_webp((b"EXIF", OVERLAPPING))),
        "bytes of values in a directory",
    ),
    "avif, exif directory": (
        # Pillow would read these when it writes them.
        encoded(picture(40, 30), "AVIF", exif=EXIF_PREFIX + SAME_SIZE).replace(SAME_SIZE, FRACTIONS),
        "10001 numbers in a directory",
    ),
    "bmp, run lengths": (rle_bmp(4096, 2049, b"\0\1"), "8392704 run-length coded pixels, the limit is 8388608"),
    "bmp, no progress": (rle_bmp(8, 8, bytes(2**23)), "bytes of run lengths"),
    "tiff, strips": (tiff(1, 2, bytes(2), t273=(8,) * (2**16 + 1)), "65537 strips or tiles, the limit is 65536"),
    "tiff, a few strips": (tiff(1, 2, bytes(2), t278=(1,), t273=(8,) * 5), "5 strips or tiles, which its 1x2 pix"),
    "tiff, entries": (
        directory(*((n, LONG, 1, 1) for n in range(4097))),
        "4097 entries in a directory, the limit is 4096",
    ),
    "tiff, overlapping values": (OVERLAPPING, "bytes of values in a directory"),
    "tiff, fractions": (FRACTIONS, "10001 numbers in a directory, the limit is 10000"),
}


@pytest.mark.filterwarnings("ignore:.*EXIF", "ignore:.*MPO")
@pytest.mark.parametrize("name", COSTLY)
def test_refuses_what_is_costly_to_open(name):
    error = refused(*COSTLY[name])
    assert error.code == "invalid_image"


# What Pillow has found is looked at again: a TIFF's strips, and Exif data that it takes apart last.
LATER = {"tiff, a few strips", "png, exif directory", "png, exif as text", "webp, exif directory"}


@pytest.mark.parametrize("name", sorted(COSTLY.keys() - LATER))
def test_refuses_it_before_pillow_opens_it(name, monkeypatch):
    monkeypatch.setattr(decoding, "_open", lambda *_: pytest.fail("opened"))
    refused(*COSTLY[name])


@pytest.mark.parametrize("file", [JPEG, PROGRESSIVE], ids=["baseline", "progressive"])
def test_a_motion_photo(file):
    """A phone appends a video: what looks like scans there is none of the picture's."""
    video = encoded(picture(40, 30), "AVIF") + np.random.default_rng(0).bytes(5000) + b"\xff\xda\0\x08" * 305
    assert pixels(file + video) == pixels(file)
    assert pixels(file + JPEG * 300) == pixels(file)


def test_scans_of_a_sequential_jpeg_count_too():
    """Where its components come one by one, each scan costs a pass, also when it is empty."""
    data = encoded(picture(64, 64), "JPEG", subsampling=0)
    at = data.index(b"\xff\xda")
    scan = segment(0xDA, bytes([1, 1, 0, 0, 63, 0]))
    refused(data[:at] + scan * 201 + data[-2:], "201 scans, the limit is 200")


def icc_in_pieces(count: int) -> bytes:
    return b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes([n + 1, count]) + bytes(60_000)) for n in range(count))


def png_with(**options: object) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", "a name")
    info.add_text("parameters", "steps " * 20_000)
    info.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta>" + "text " * 300_000, zip=False)
    info.add_text("Comment", "word " * 30_000, zip=True)
    return encoded(picture(40, 30), pnginfo=info, icc_profile=bytes(200_000), **options)


def multi_page() -> bytes:
    pages = [picture(40, 30, seed) for seed in range(40)]
    return encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])


def in_strips(image: Image.Image, rows: int, **options: object) -> bytes:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[278] = rows
    return encoded(image, "TIFF", tiffinfo=tags, strip_size=rows * image.width * 3, **options)


def tiled() -> bytes:
    """Tiles of 16x16, and their numbers of bytes."""
    levels = noise(64, 48, channels=1)[..., 0]
    tiles = [levels[y : y + 16, x : x + 16].tobytes() for y in range(0, 48, 16) for x in range(0, 64, 16)]
    return tiff(64, 48, b"".join(tiles), tile=(16, 16), t325=(256,) * 12, t324=tuple(range(256, 256 + 12 * 256, 256)))


def idats(data: bytes, size: int) -> bytes:
    """A PNG whose pixels come in chunks of a few bytes."""
    at = data.index(b"IDAT") - 4
    length = int.from_bytes(data[at : at + 4], "big")
    packed = data[at + 8 : at + 8 + length]
    chunks = b"".join(png_chunk(b"IDAT", packed[n : n + size]) for n in range(0, length, size))
    return data[:at] + chunks + data[at + 12 + length :]


def many_frames(format: str, count: int) -> bytes:
    frames = [Image.new("L", (8, 8), n % 251) for n in range(count)]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=20)


def camera_exif() -> Image.Exif:
    tags = Image.Exif()
    tags[0x010F], tags[0x0110] = "Maker", "Model"
    tags[0x011A] = tags[0x011B] = 72.0
    tags.get_ifd(34665).update({0x9000: b"0230", 0x829A: 0.01, 0x927C: bytes(40_000), 40962: 40})
    tags.get_ifd(34853).update({1: "N", 2: (52.0, 31.0, 12.0), 3: "E", 4: (13.0, 24.0, 1.0)})
    return tags


ORDINARY = {
    "jpeg, icc profile in many segments": (lambda: in_jpeg(icc_in_pieces(60)), JPEG),
    "jpeg, large xmp": (
        lambda: in_jpeg(
            segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
            *[segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + bytes(65_000))] * 100,
        ),
        JPEG,
    ),
    "jpeg, camera's exif": (lambda: encoded(picture(40, 30), "JPEG", exif=camera_exif()), JPEG),
    "jpeg, exif with a thumbnail": (
        lambda: in_jpeg(segment(0xE1, EXIF_PREFIX + directory((0x0112, SHORT, 1, 1)) + JPEG * 3)),
        JPEG,
    ),
    "jpeg, exif that points at a directory Pillow does not read": (
        lambda: in_jpeg(segment(0xE1, EXIF_PREFIX + FRACTIONS[:26] + INNER + bytes(20_100))),
        JPEG,
    ),
    "jpeg, exif directory that is none": (
        lambda: in_jpeg(segment(0xE1, EXIF_PREFIX + b"II*\0\x08\0\0\0" + b"\xff" * 999)),
        JPEG,
    ),
    "jpeg, exif in two segments": (
        lambda: in_jpeg(segment(0xE1, exif(1) + bytes(50_000)), segment(0xE1, EXIF_PREFIX + bytes(50_000))),
        JPEG,
    ),
    "jpeg, fill bytes and a comment": (lambda: in_jpeg(b"\xff" * 9, segment(0xFE, b"words"), b"\xff" * 3), JPEG),
    "jpeg, fill bytes at its end": (lambda: JPEG[:-2] + b"\xff" * 3000 + JPEG[-2:], JPEG),
    "jpeg, restart markers": (
        lambda: encoded(picture(400, 300), "JPEG", restart_marker_blocks=1),
        encoded(picture(400, 300), "JPEG"),
    ),
    "mpo": (lambda: animation("MPO"), encoded(picture(40, 30, 0), "JPEG")),
    "png, text, xmp, icc": (png_with, PNG),
    "png, exif": (lambda: encoded(picture(40, 30), exif=camera_exif()), PNG),
    "png, small chunks": (lambda: idats(PNG, 1), PNG),
    "apng of many frames": (lambda: many_frames("PNG", 3000), encoded(Image.new("L", (8, 8), 0))),
    "gif of many frames": (lambda: many_frames("GIF", 3000), encoded(Image.new("L", (8, 8), 0), "GIF")),
    "gif, comment and xmp": (
        lambda: in_gif(
            b"!\xfe" + sub_blocks(b"words " * 2000),
            b"!\xff\x0bXMP DataXMP" + b"<x:xmpmeta>" * 50_000 + bytes(range(255, -1, -1)) + b"\0",
            b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0",
        ),
        GIF,
    ),
    "webp of many frames": (lambda: many_frames("WEBP", 1000), encoded(Image.new("L", (8, 8), 0))),
    "webp, icc, exif, xmp": (
        lambda: encoded(
            picture(40, 30), "WEBP", icc_profile=bytes(300_000), exif=camera_exif().tobytes(), xmp=bytes(10**6)
        ),
        WEBP,
    ),
    "avif, icc, exif, xmp": (
        lambda: encoded(
            picture(40, 30), "AVIF", icc_profile=bytes(300_000), exif=camera_exif().tobytes(), xmp=bytes(10**6)
        ),
        encoded(picture(40, 30), "AVIF"),
    ),
    "avif of many frames": (lambda: many_frames("AVIF", 30), encoded(Image.new("L", (8, 8), 0))),
    "tiff, many strips": (lambda: in_strips(picture(40, 300), 1), encoded(picture(40, 300))),
    "tiff, strips, lzw": (lambda: in_strips(picture(40, 300), 7, compression="tiff_lzw"), encoded(picture(40, 300))),
    "tiff, pages": (multi_page, PNG),
    "tiff, big": (lambda: encoded(picture(40, 30), "TIFF", big_tiff=True), PNG),
    "tiff, big, lzw": (lambda: encoded(picture(40, 30), "TIFF", big_tiff=True, compression="tiff_lzw"), PNG),
    "tiff, exif": (lambda: encoded(picture(40, 30), "TIFF", exif=camera_exif(), icc_profile=bytes(10**5)), PNG),
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("name", ORDINARY)
def test_reads_ordinary_and_odd_files(name):
    make, same = ORDINARY[name]
    data = make()
    image, expected = (np.asarray(decode_image(file, LIMITS)) for file in (data, same))
    assert image.shape == expected.shape
    assert np.abs(image.astype(int) - expected).max() <= (2 if data[:4] == b"RIFF" or data[4:8] == b"ftyp" else 0)


def test_tiff_tiles():
    data = tiled()
    start = len(data) - 12 * 256
    places = struct.pack("<12I", *range(256, 256 + 12 * 256, 256))
    data = data.replace(places, struct.pack("<12I", *range(start, start + 12 * 256, 256)))
    assert greys(data) == noise(64, 48, channels=1)[..., 0].ravel().tolist()


def test_a_run_length_coded_bmp():
    data = rle_bmp(4, 2, bytes([4, 7, 0, 0, 2, 1, 2, 9, 0, 1]))
    assert pixels(data) == pixels(encoded(Image.open(io.BytesIO(data)), "PNG"))


@pytest.mark.parametrize("name", FILES)
def test_pillow_pictures_pass_too(name):
    data = FILES[name]()
    image = normalize_image(Image.open(io.BytesIO(data)), LIMITS)
    assert np.array_equal(np.asarray(image), pixels(data))
