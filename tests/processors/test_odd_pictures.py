"""Files with much in them beside one picture are read like plain ones."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image, PngImagePlugin, TiffImagePlugin

from processors.image.decoding import decode_image, normalize_image
from tests.processors.helpers import encoded, noise, picture
from tests.processors.test_decoding import FILES, LIMITS, animation, exif, png_chunk
from tests.processors.test_picture_kinds import greys, pixels, tiff

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


def directory(*entries: tuple[int, int, int, int], prefix: bytes = b"") -> bytes:
    """A TIFF header and a directory of (tag, type, count, value or place)."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return prefix + b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


SHORT = 3
EXIF_PREFIX = b"Exif\0\0"


def rle_bmp(width: int, height: int, data: bytes, compression: int = 1) -> bytes:
    palette = bytes(range(256)) * 4
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + palette + data


@pytest.mark.parametrize("file", [JPEG, PROGRESSIVE], ids=["baseline", "progressive"])
def test_a_motion_photo(file):
    """A phone appends a video: what looks like scans there is none of the picture's."""
    video = encoded(picture(40, 30), "AVIF") + np.random.default_rng(0).bytes(5000) + b"\xff\xda\0\x08" * 305
    assert pixels(file + video) == pixels(file)
    assert pixels(file + JPEG * 300) == pixels(file)


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


ODD = {
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
@pytest.mark.parametrize("name", ODD)
def test_reads_odd_files(name):
    make, same = ODD[name]
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
