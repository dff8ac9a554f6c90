"""Pictures that no encoder at hand writes, built byte by byte: wide TIFFs, interlaced PNGs, YCCK, and costly lies."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from processors.formats import HEAD_BYTES, mime_type, modality_of
from processors.image import decoding as rgb
from processors.image.decoding import DecodeLimits, decode_image, normalize_image
from processors.inputs import Modality
from tests.nasty_media import png_chunk
from tests.processors.clips import make_clip
from tests.processors.helpers import decoded_and_growth, encoded, picture
from tests.processors.test_decoding import FILES, LIMITS, NOT_PICTURES, reference_rgb
from vlmserve_common.errors import BadRequestError

GREY, RGB, CMYK = 1, 2, 5
BITS, COMPRESSION, PHOTOMETRIC, SAMPLES, STRIP_BYTES = 258, 259, 262, 277, 279
TILE_WIDTH, TILE_LENGTH, TILE_OFFSETS, TILE_BYTES = 322, 323, 324, 325
EXTRA_SAMPLES, SAMPLE_FORMAT = 338, 339


def tiff(width, height, data, *, bits=(8,), photometric=GREY, order="<", deflate=False, tile=None, **tags):
    """A TIFF of one strip, or of one tile of size `tile`. order: struct's sign for the byte order."""
    data = zlib.compress(data) if deflate else data
    fields = {
        256: (width,),
        257: (height,),
        BITS: bits,
        COMPRESSION: (8 if deflate else 1,),
        PHOTOMETRIC: (photometric,),
        SAMPLES: (len(bits),),
        **({TILE_WIDTH: (tile[0],), TILE_LENGTH: (tile[1],)} if tile else {278: (height,)}),
        (TILE_BYTES if tile else STRIP_BYTES): (len(data),),
        **{int(name[1:]): values for name, values in tags.items()},
    }
    offsets = TILE_OFFSETS if tile else 273
    count = len(fields) + 1
    end_of_directory = 8 + 2 + 12 * count + 4
    outside = b""
    entries = []
    for tag, values in fields.items():
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(packed) > 4:
            entries.append((tag, len(values), struct.pack(f"{order}I", end_of_directory + len(outside))))
            outside += packed
        else:
            entries.append((tag, len(values), packed))
    entries.append((offsets, 1, struct.pack(f"{order}I", end_of_directory + len(outside))))
    directory = b"".join(struct.pack(f"{order}HHI", tag, 4, n) + value for tag, n, value in sorted(entries))
    magic = b"II*\0" if order == "<" else b"MM\0*"
    head = magic + struct.pack(f"{order}IH", 8, count)
    return head + directory + bytes(4) + outside + data


def pixels(data, limits=LIMITS):
    return np.asarray(decode_image(data, limits)).tolist()


def greys(data):
    levels = np.asarray(decode_image(data, LIMITS))
    assert np.ptp(levels, axis=-1).max() == 0
    return levels[..., 0].ravel().tolist()


def refused(data, match, limits=LIMITS):
    with pytest.raises(BadRequestError, match=match) as caught:
        decode_image(data, limits)
    assert caught.value.status == 400
    return caught.value


# ---------------------------------------------------------------- more than 8 bits

WIDE = (0, 128, 129, 385, 32768, 65535)
NARROW = [0, 0, 1, 1, 128, 255]


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("deflate", [False, True])
def test_16_bit_grey_tiff_is_scaled(order, deflate):
    data = struct.pack(f"{order}6H", *WIDE)
    assert greys(tiff(3, 2, data, bits=(16,), order=order, deflate=deflate)) == NARROW


def test_16_bit_grey_tiff_whose_zero_is_white():
    data = struct.pack("<6H", *WIDE)
    assert greys(tiff(6, 1, data, bits=(16,), photometric=0)) == [255 - level for level in NARROW]


def test_12_bit_grey_tiff_is_scaled_from_12_bits():
    data = bytes([0x00, 0x08, 0x00, 0x00, 0x8F, 0xFF])  # 0, 0x800, 8, 0xfff
    assert greys(tiff(4, 1, data, bits=(12,))) == [0, 128, 0, 255]


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B"])
def test_wide_pillow_pictures_are_scaled(mode):
    wide = np.array([WIDE], {"I": np.int32, "I;16": "<u2", "I;16B": ">u2"}[mode])
    image = Image.frombytes(mode, (6, 1), wide.tobytes())
    assert np.asarray(normalize_image(image, LIMITS))[0, :, 0].tolist() == NARROW


UNSUPPORTED = {
    "float": (tiff(2, 1, struct.pack("<2f", 0.5, 1), bits=(32,), t339=(3,)), "floating-point"),
    "half": (tiff(2, 1, struct.pack("<2e", 0.5, 1), bits=(16,), t339=(3,)), "sample format"),
    "double": (tiff(2, 1, struct.pack("<2d", 0.5, 1), bits=(64,), t339=(3,)), "sample format"),
    "float colour": (
        tiff(1, 1, struct.pack("<3f", 0, 0.5, 1), bits=(32,) * 3, photometric=RGB, t339=(3, 3, 3)),
        "sample format",
    ),
    "signed": (tiff(2, 1, struct.pack("<2h", -5, 7), bits=(16,), t339=(2,)), "signed pixels .here of 16 bits"),
    "signed, no negative value": (tiff(2, 1, struct.pack("<2h", 5, 7), bits=(16,), t339=(2,)), "signed pixels"),
    "signed, 8 bits": (tiff(2, 1, b"\x05\xff", t339=(2,)), "signed pixels .here of 8 bits"),
    "32 bits": (tiff(2, 1, struct.pack("<2I", 3, 65536), bits=(32,)), "pixels of 32 bits are not supported, 16 are"),
    "32 bits, small values": (tiff(2, 1, struct.pack("<2I", 3, 255), bits=(32,)), "pixels of 32 bits"),
    "32 bits, signed": (encoded(Image.new("I", (2, 1), 200), "TIFF"), "signed pixels .here of 32 bits"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refuses_other_kinds_of_pixels_by_their_name(name):
    refused(*UNSUPPORTED[name])


# ---------------------------------------------------------------- formats by name


def test_every_readable_format_is_known_by_its_head():
    assert all(modality_of(make()[:128]) is Modality.IMAGE for make in FILES.values())
    assert not any(
        modality_of(data[:128]) is Modality.IMAGE for name, data in NOT_PICTURES.items() if "magic" not in name
    )


OTHER_FORMATS = {
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
    "heic of the general brand": (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC"),
    "jpeg 2000": (encoded(picture(32, 32), "JPEG2000"), "JPEG 2000"),
    "jpeg xl": (b"\xff\x0a\xfa\x7f", "JPEG XL"),
    "svg": (b'<?xml version="1.0"?>\n<!-- a -->\n<svg xmlns="x"/>', "SVG"),
    "icon": (encoded(picture(32, 32), "ICO"), "ICO"),
    "psd": (b"8BPS\0\1", "PSD"),
    "pdf": (b"%PDF-1.7", "PDF"),
    "avi": (b"RIFF\x10\0\0\0AVI LIST", "AVI"),
    "page": (b"\n<!DOCTYPE html><html>", "HTML"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats_are_called_by_their_names(name):
    data, word = OTHER_FORMATS[name]
    assert "JPEG, WebP" in refused(data, word).message


@pytest.mark.parametrize("data", [b"\0\0\0\x18ftypisom\0\0\0\0", b"\x1aE\xdf\xa3\0"])
def test_a_video_is_told_where_it_belongs(data):
    refused(data, r"is a video .*, not a picture: send it in a part of type video_url")


def test_what_a_library_says_of_bytes_is_said_without_pythons_quotes():
    whole = encoded(picture(64, 64), "PNG")
    data = whole[:37] + b"\xff\xff\xff\xff" + whole[41:]  # a chunk of no kind
    assert "b'" not in refused(data, "PNG picture is broken").message


@pytest.mark.parametrize(("page", "word"), [(b"<svg xmlns='x'/>", "SVG"), (b"<!doctype html><html>", "HTML")])
def test_only_a_files_head_says_its_format(page, word):
    """Text formats may begin with white space: through a whole file it would be followed with Python's lock held."""
    assert word in refused(b" " * 1000 + page, word).message
    assert "not a picture of a supported format" in refused(b" " * 5000 + page, 'begins with "        "').message
    assert "not a picture" in refused(b"<!--" + b" " * 5000 + b"-->" + page, "begins with").message


def test_a_pillow_without_avif_says_so(monkeypatch):
    data = encoded(picture(40, 30), "AVIF")
    monkeypatch.setattr(features, "check", lambda name: name != "avif")
    message = refused(data, "an AVIF picture, which is not a supported").message
    assert message.endswith("PNG, JPEG, WebP, GIF, BMP, TIFF are read")


# ---------------------------------------------------------------- no pixels, lies, and what is costly to decode


def edited(data, at, format, *values):
    return data[:at] + struct.pack(format, *values) + data[at + struct.calcsize(format) :]


def test_pictures_without_pixels():
    empty = png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")
    for size in ((0, 5), (5, 0)):
        header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
        refused(b"\x89PNG\r\n\x1a\n" + header + empty, "no pixels")
    refused(edited(encoded(picture(4, 4), "BMP"), 22, "<i", 0), "no pixels")
    refused(tiff(0, 4, b""), "no pixels")


def test_a_gif_frame_larger_than_its_screen():
    data = encoded(picture(40, 30).quantize(8), "GIF")
    refused(edited(data, data.index(b"\x2c") + 5, "<HH", 20000, 20000), "of 400000000 pixels; the limit is 64000000")
    refused(edited(data, data.index(b"\x2c") + 5, "<HH", 5000, 5000), "5000x5000", DecodeLimits(max_image_pixels=10**7))


@pytest.mark.parametrize(
    "name", ["rgba", "la", "palette alpha", "palette one transparent", "rgb colour key", "gif transparent"]
)
def test_transparency_is_laid_on_white_band_by_band(name, monkeypatch):
    monkeypatch.setattr(rgb, "_BAND_PIXELS", 40 * 7)
    data = FILES[name]()
    assert np.array_equal(pixels(data), reference_rgb(data))


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B"])
def test_wide_grey_is_scaled_band_by_band(mode, monkeypatch):
    """A step for each row of a thin picture would take seconds, with Python's lock held."""
    monkeypatch.setattr(rgb, "_BAND_PIXELS", 1000)
    cut = Image.Image.crop
    boxes = []
    monkeypatch.setattr(Image.Image, "crop", lambda image, box: boxes.append(box) or cut(image, box))
    wide = (np.arange(10_500) * 6).astype({"I": np.int32, "I;16": "<u2", "I;16B": ">u2"}[mode])
    image = Image.frombytes(mode, (1, 10_500), wide.tobytes())
    levels = np.asarray(rgb.to_rgb(image))
    assert levels[:, 0, 0].tolist() == ((wide.astype(int) * 255 + 32767) // 65535).tolist()
    assert levels.shape == (10_500, 1, 3)
    assert np.ptp(levels, axis=-1).max() == 0
    assert len(boxes) == 2 * 11  # once for the range, once for the pixels


LONG_SIDE = 113_138  # one more than 64 * 10**6 pixels have at 200:1


@pytest.mark.parametrize("size", [(1, LONG_SIDE), (LONG_SIDE, 1)])
def test_thin_pictures_are_refused_before_they_are_decoded(size, monkeypatch):
    """Pillow keeps 8 bytes for each row, and others work by rows."""
    fine = Image.new("L", (size[0] - (size[0] > 1), size[1] - (size[1] > 1)), 5)
    assert decode_image(encoded(fine, "TIFF"), LIMITS).size == fine.size
    small = DecodeLimits(max_image_pixels=400)
    assert decode_image(encoded(Image.new("L", (282, 1))), small).size == (282, 1)
    refused(encoded(Image.new("L", (283, 1))), "283x1 pixels: its longer side may be 282", small)
    files = [encoded(Image.new("L", size), format) for format in ("PNG", "TIFF", "BMP")]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    for data in files:
        error = refused(
            data, rf"{size[0]}x{size[1]} pixels: its longer side may be 113137 .*\(setting --max-image-pixels"
        )
        assert error.code == "image_too_large"
    with pytest.raises(BadRequestError, match="its longer side may be 113137"):
        normalize_image(Image.new("L", size), LIMITS)


def test_memory_of_a_large_transparent_picture(tmp_path):
    """Two pictures of four bytes a pixel, the one that was read and the one on white, and not four of them."""
    data = encoded(Image.new("RGBA", (4096, 4096), (10, 20, 30, 40)), compress_level=1)
    count, grown = decoded_and_growth(data, "image", tmp_path)
    assert (count, grown < 2 * 64 + 32) == (1, True)


# ---------------------------------------------------------------- what a file is called, by its first bytes


MIME_TYPES = [
    (encoded(Image.new("RGB", (8, 8)), name), f"image/{name}") for name in ("png", "jpeg", "webp", "gif", "bmp")
]
MIME_TYPES += [
    (make_clip(2), "video/mp4"),
    (make_clip(2, container="mov"), "video/quicktime"),
    (make_clip(2, container="matroska"), "video/x-matroska"),
    (make_clip(2, container="webm", codec="libvpx-vp9"), "video/webm"),
    (b"", "application/octet-stream"),
    (b"%PDF-1.7", "application/octet-stream"),
    (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "application/octet-stream"),
]


@pytest.mark.parametrize(("data", "name"), MIME_TYPES, ids=[name for _, name in MIME_TYPES])
def test_mime_types(data: bytes, name: str) -> None:
    assert mime_type(data[:HEAD_BYTES]) == name
