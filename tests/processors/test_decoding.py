"""Picture files of every kind: those that are read, how, and those that are refused."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from processors.image.decoding import DecodeLimits, decode_image, normalize_image, to_rgb
from tests import hf_env  # noqa: F401
from tests.nasty_media import pictures_that_say_they_are_large, png_chunk
from tests.processors.helpers import encoded, noise, picture
from vlmserve_common.errors import BadRequestError

LIMITS = DecodeLimits()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: bytes) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + body + png_chunk(b"IEND", b"")


def reference_rgb(data: bytes) -> np.ndarray:
    from transformers.image_transforms import convert_to_rgb

    return convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_numpy=True)


def with_alpha(mode: str) -> Image.Image:
    pixels = noise(40, 30, channels=4)
    pixels[:10, :, 3] = 0
    pixels[10:20, :, 3] = 255
    return Image.fromarray(pixels, "RGBA").convert(mode)


def palette(**options: object) -> bytes:
    return encoded(picture(40, 30).quantize(32), "PNG", **options)


def animation(format: str) -> bytes:
    frames = [picture(40, 30, seed) for seed in range(3)]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=100)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


FILES = {
    "png": lambda: encoded(picture(40, 30)),
    "jpeg": lambda: encoded(picture(40, 30), "JPEG"),
    "jpeg progressive": lambda: encoded(picture(40, 30), "JPEG", progressive=True),
    "jpeg grey": lambda: encoded(picture(40, 30).convert("L"), "JPEG"),
    "jpeg cmyk": lambda: encoded(picture(40, 30).convert("CMYK"), "JPEG"),
    "webp lossy": lambda: encoded(picture(40, 30), "WEBP"),
    "webp alpha": lambda: encoded(with_alpha("RGBA"), "WEBP", lossless=True),
    "webp animated": lambda: animation("WEBP"),
    "gif": lambda: encoded(picture(40, 30), "GIF"),
    "gif animated": lambda: animation("GIF"),
    "gif transparent": lambda: encoded(with_alpha("RGBA"), "GIF"),
    "bmp": lambda: encoded(picture(40, 30), "BMP"),
    "tiff": lambda: encoded(picture(40, 30), "TIFF"),
    "tiff lzw": lambda: encoded(picture(40, 30), "TIFF", compression="tiff_lzw"),
    "tiff cmyk": lambda: encoded(picture(40, 30).convert("CMYK"), "TIFF"),
    "avif": lambda: encoded(picture(40, 30), "AVIF"),
    "rgba": lambda: encoded(with_alpha("RGBA")),
    "la": lambda: encoded(with_alpha("LA")),
    "grey": lambda: encoded(picture(40, 30).convert("L")),
    "bilevel": lambda: encoded(picture(40, 30).convert("1")),
    "palette": palette,
    "palette one transparent": lambda: palette(transparency=3),
    "palette alpha": lambda: palette(transparency=bytes(range(0, 256, 8))),
    "grey colour key": lambda: encoded(picture(40, 30).convert("L"), transparency=128),
    "rgb colour key": lambda: encoded(picture(40, 30), transparency=picture(40, 30).getpixel((3, 4))),
    "apng": lambda: animation("PNG"),
    "mpo": lambda: animation("MPO"),
    "tiff big": lambda: encoded(picture(40, 30), "TIFF", big_tiff=True),
    "jpeg and a video behind it": lambda: encoded(picture(40, 30), "JPEG") + encoded(picture(40, 30), "AVIF"),
}


@pytest.mark.parametrize("name", FILES)
def test_reads_what_transformers_reads_out_of_it(name):
    data = FILES[name]()
    image = decode_image(data, LIMITS)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), reference_rgb(data))


@pytest.mark.parametrize(
    ("format", "orientation"), [*(("JPEG", turn) for turn in range(1, 9)), ("PNG", 6), ("WEBP", 6), ("TIFF", 6)]
)
def test_orientation(format, orientation):
    data = encoded(picture(40, 30), format, exif=exif(orientation))
    image = decode_image(data, LIMITS)
    assert image.size == ((40, 30) if orientation < 5 else (30, 40))
    assert np.array_equal(np.asarray(image), reference_rgb(data))
    # What is upright stays so: processing goes over it once more.
    assert np.array_equal(np.asarray(normalize_image(image, LIMITS)), np.asarray(image))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_unreadable_exif_is_ignored():
    data = encoded(picture(40, 30), "JPEG", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    assert decode_image(data, LIMITS).size == (40, 30)


def test_16_bit_grey_is_scaled():
    rows = b"".join(b"\0" + struct.pack(">4H", *row) for row in [(0, 128, 129, 385), (386, 32768, 65407, 65535)])
    image = decode_image(png(4, 2, 16, 0, rows), LIMITS)
    assert np.asarray(image)[..., 0].tolist() == [[0, 0, 1, 1], [2, 128, 255, 255]]
    assert np.ptp(np.asarray(image), axis=-1).max() == 0


def test_16_bit_grey_with_a_transparent_level():
    rows = b"\0" + struct.pack(">3H", 0, 1000, 65535)
    image = decode_image(png(3, 1, 16, 0, rows, png_chunk(b"tRNS", struct.pack(">H", 1000))), LIMITS)
    assert np.asarray(image)[0, :, 0].tolist() == [0, 255, 255]


def test_premultiplied_alpha():
    image = Image.fromarray(np.array([[[100, 50, 0, 128]]], np.uint8), "RGBA").convert("RGBa")
    assert np.abs(np.asarray(to_rgb(image)).astype(int) - [[[177, 152, 127]]]).max() <= 1


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_wider_than_16_bits_are_refused(mode):
    image = Image.fromarray(np.full((4, 4), 100_000, np.float32 if mode == "F" else np.int32))
    assert image.mode == mode
    expected = "floating-point" if mode == "F" else "values from 100000 to 100000; whole numbers from 0 to 65535"
    with pytest.raises(BadRequestError, match=expected):
        normalize_image(image, LIMITS)
    with pytest.raises(BadRequestError, match="floating-point" if mode == "F" else "signed pixels"):
        decode_image(encoded(image, "TIFF"), LIMITS)


NOT_PICTURES = {
    "nothing": b"",
    "text": b"this is not a picture",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "pdf": b"%PDF-1.4 none",
    "bytes": bytes(range(256)) * 8,
    "noise": np.random.default_rng(1).bytes(4096),
    "magic only": b"\x89PNG\r\n\x1a\n",
    "jpeg magic and noise": b"\xff\xd8\xff" + np.random.default_rng(2).bytes(4096),
    "gif magic and noise": b"GIF89a" + np.random.default_rng(3).bytes(4096),
    "webp magic and noise": b"RIFF\0\0\0\0WEBP" + np.random.default_rng(4).bytes(4096),
    "tiff magic and noise": b"II*\0" + np.random.default_rng(5).bytes(4096),
    "bmp magic and noise": b"BM" + np.random.default_rng(6).bytes(4096),
    "avif magic and noise": b"\0\0\0\x1cftypavif" + np.random.default_rng(7).bytes(4096),
    "mp4": b"\0\0\0\x1cftypisom" + bytes(64),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "ppm": b"P6 2 2 255 " + bytes(12),
    "icon": encoded(picture(32, 32), "ICO"),
    "jpeg 2000": encoded(picture(32, 32), "JPEG2000"),
    "tga": encoded(picture(32, 32), "TGA"),
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("name", NOT_PICTURES)
def test_refuses_what_is_no_picture(name):
    with pytest.raises(BadRequestError, match="picture") as caught:
        decode_image(NOT_PICTURES[name], LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.95])
def test_refuses_a_file_that_was_cut_off(format, part):
    data = encoded(picture(300, 200), format)
    with pytest.raises(BadRequestError, match="picture"):
        decode_image(data[: int(len(data) * part)], LIMITS)


# without two that their decoders refuse in words of their own
_UNREAD = ("AVIF of 60000x60000, 64x64 in truth", "WebP whose canvas is of 2**48 pixels")
BOMBS = {one.name: one.data for one in pictures_that_say_they_are_large() if one.name not in _UNREAD}


@pytest.mark.parametrize("name", BOMBS)
def test_refuses_a_bomb_from_its_header(name, monkeypatch):
    def decoded(*_):
        raise AssertionError("decoded before the limit was checked")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadRequestError, match=r"the limit is 64000000 \(setting --max-image-pix") as caught:
            decode_image(BOMBS[name], LIMITS)
    assert caught.value.code == "image_too_large"


def test_the_limit_is_a_setting_and_inclusive():
    data = encoded(picture(40, 30))
    assert decode_image(data, DecodeLimits(max_image_pixels=1200)).size == (40, 30)
    with pytest.raises(BadRequestError, match="40x30 = 1200 pixels; the limit is 1199"):
        decode_image(data, DecodeLimits(max_image_pixels=1199))


def test_pillow_pictures_are_limited_too():
    with pytest.raises(BadRequestError, match="--max-image-pixels"):
        normalize_image(picture(40, 30), DecodeLimits(max_image_pixels=1199))
    broken = Image.open(io.BytesIO(encoded(picture(300, 200))[:5000]))
    with pytest.raises(BadRequestError, match="cannot be read"):
        normalize_image(broken, LIMITS)


def test_a_picture_above_pillows_own_limit_needs_only_ours(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_image(encoded(picture(40, 30)), LIMITS).size == (40, 30)
