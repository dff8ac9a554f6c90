"""AVIFs whose AV1 data are larger than the file says: what is decoded counts."""

from __future__ import annotations

import io
import struct

import pytest
from PIL import Image

from processors.image import decoding
from processors.image.av1_sizes import FrameSizes, av1_units
from processors.image.avif_structure import check_avif
from processors.image.decoding import DecodeLimits
from tests.processors.helpers import encoded, picture
from tests.processors.test_decoding import LIMITS, animation
from tests.processors.test_picture_kinds import edited, pixels, refused

LARGE = DecodeLimits(max_image_pixels=1000 * 800 - 1)


def avif(width: int = 1000, height: int = 800, **options: object) -> bytes:
    return encoded(Image.new("RGB", (width, height), (9, 99, 199)), "AVIF", **options)


def says(data: bytes, width: int, height: int) -> bytes:
    """The same with another size in all its `ispe` and sample entries."""
    size = struct.pack(">II", width, height)
    at = data.find(b"ispe")
    while at >= 0:
        data = data[: at + 8] + size + data[at + 16 :]
        at = data.find(b"ispe", at + 1)
    return data


class Bits(list):
    """Numbers of so many bits, one after the other, to bytes."""

    def add(self, *numbers: tuple[int, int]) -> Bits:
        for value, count in numbers:
            self.extend(value >> bit & 1 for bit in reversed(range(count)))
        return self

    def bytes(self) -> bytes:
        padded = self + [0] * (-len(self) % 8)
        return bytes(int("".join(map(str, padded[at : at + 8])), 2) for at in range(0, len(padded), 8))


def unit(kind: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([kind << 3 | 2, len(content)]) + content


def sequence(width: int = 64, height: int = 48, *, bits: int = 16, timing: bool = False, ids: bool = False) -> bytes:
    """A sequence header that is not reduced, by section 5.5.1."""
    head = Bits().add((0, 3), (0, 1), (0, 1))
    if timing:  # 1001 ticks; intervals are not equal; a decoder model of 10, 20 and 7 bits
        head.add((1, 1), (1001, 32), (60000, 32), (0, 1), (1, 1), (9, 5), (1, 32), (19, 5), (6, 5))
    else:
        head.add((0, 1))
    head.add((1, 1), (1, 5))  # display delays; two operating points
    for level in (8, 5):
        head.add((0, 12), (level, 5))
        if level > 7:
            head.add((1, 1))
        if timing:
            head.add((1, 1), (3, 10), (4, 10), (0, 1))
        head.add((1, 1), (7, 4))
    head.add((bits - 1, 4), (bits - 1, 4), (width - 1, bits), (height - 1, bits), (int(ids), 1))
    if ids:
        head.add((3, 4), (1, 3))  # 5 + 2 bits
    head.add((0, 3), (0, 4), (1, 1), (0, 2), (1, 1), (1, 1))
    return unit(1, head.bytes() + bytes(4))


def frame(*, states_size: bool, shown: bool = True, timing: bool = False, ids: bool = False, kind: int = 0) -> bytes:
    """A frame header as far as its size, by section 5.9.2."""
    head = Bits().add((0, 1), (kind, 2), (int(shown), 1))
    if shown:
        head.add((5, 7 if timing else 0))
    else:
        head.add((1, 1))
    if not (kind == 0 and shown):
        head.add((0, 1))
    head.add((0, 1), (1, 1), (0, 1), (0, 7 if ids else 0), (int(states_size), 1))
    return unit(6, head.bytes() + b"\xff")


def sizes(data: bytes) -> list[tuple[int, int]]:
    reader = FrameSizes()
    return [size for found in av1_units(memoryview(data)) if (size := reader.size(found)) is not None]


def av1_of(data: bytes) -> bytes:
    return data[data.index(b"mdat") + 4 :]


@pytest.mark.parametrize("options", [{}, {"quality": 100, "subsampling": "4:4:4"}, {"speed": 10}, {"codec": "aom"}])
@pytest.mark.parametrize("size", [(1, 1), (64, 48), (1000, 800), (4097, 130)])
def test_reads_the_size_of_av1_data(size, options):
    assert sizes(av1_of(avif(*size, **options))) == [size]


def test_reads_the_size_of_an_animations_first_frame():
    """Its headers are the long ones."""
    data = animation("AVIF")
    assert sizes(av1_of(data))[0] == (40, 30)
    assert pixels(data)


@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_a_frame_may_state_its_own_size(timing, ids, shown):
    head = sequence(timing=timing, ids=ids)
    plain, own = (frame(states_size=own, shown=shown, timing=timing, ids=ids) for own in (False, True))
    assert sizes(head + plain + own) == [(64, 48), (65536, 65536)]
    assert sizes(sequence(bits=6, timing=timing, ids=ids) + own) == [(64, 64)]
    assert sizes(head + frame(states_size=False, shown=shown, timing=timing, ids=ids, kind=3)) == [(65536, 65536)]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (frame(states_size=False), "no sequence header"),
        (sequence()[:-6], "cut off"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff", "cut off"),
        (b"\x0a\xff", "cut off"),
        (b"\x04", "cut off"),
        (unit(1, b"\0"), "cut off"),
    ],
)
def test_broken_av1_data(data, match):
    with pytest.raises(ValueError, match=match):
        sizes(data)


@pytest.mark.parametrize("make", [avif, lambda: avif(save_all=True, append_images=[picture(1000, 800)])])
def test_a_frame_larger_than_the_file_says_is_refused_unopened(make, monkeypatch):
    data = says(make(), 64, 64)
    assert Image.open(io.BytesIO(says(avif(), 64, 64))).size == (64, 64)
    monkeypatch.setattr(decoding, "_open", lambda *_: pytest.fail("opened"))
    error = refused(data, "AVIF picture with an AV1 frame of 1000x800 = 800000 pixels; the limit is 799999", LARGE)
    assert error.code == "image_too_large"


def test_a_tracks_first_sample_counts():
    data = avif(save_all=True, append_images=[picture(1000, 800)])
    at = data.index(b"meta")
    refused(data[:at] + b"free" + data[at + 4 :], "AV1 frame of 1000x800", LARGE)
    refused(data.replace(b"stsz", b"free"), "a track without its samples' places")
    refused(data.replace(b"stss", b"stco"), "two tables of a kind")


def test_the_alpha_plane_counts_too():
    data = encoded(Image.new("RGBA", (1000, 800), (9, 99, 199, 99)), "AVIF")
    assert pixels(data)
    refused(says(data, 64, 64), "AV1 frame of 1000x800", LARGE)


def test_many_frames_of_one_picture():
    """Layers, or parts of a grid that are all made and scaled down."""
    data = avif()
    av1 = av1_of(data)
    at = data.index(b"iloc") + 4
    length = at + 4 + 2 + 2 + 2 + 2 + 2 + 4
    assert struct.unpack_from(">I", data, length)[0] == len(av1)
    hidden = unit(6, b"\x10" + bytes(20))  # a frame of the same size, with the short header
    more = edited(data + hidden * 4, length, ">I", len(av1) + 4 * len(hidden))
    refused(more, "4000000 pixels in AV1 frames, the limit is 3200000", DecodeLimits(max_image_pixels=800_000))
    fewer = edited(data + hidden * 3, length, ">I", len(av1) + 3 * len(hidden))
    check_avif(fewer, DecodeLimits(max_image_pixels=800_000))


def test_what_cannot_be_found_is_refused():
    data = avif(64, 48)
    for box in (b"meta", b"iloc", b"iinf", b"av01"):
        refused(data.replace(box, b"none"), "AV1 frames' size cannot be read")
    at = data.index(b"iloc") + 8
    refused(edited(data, at + 8, ">H", 7), "cannot be read")  # of construction method or data reference 7
    sequence_header = data.index(b"mdat") + 6
    refused(edited(data, sequence_header, "B", 0x12), "no sequence header before a frame")


def test_items_in_pieces():
    """Two pieces of one file, as often as they like, but not of more bytes than there are."""
    data = avif(64, 48)
    at = data.index(b"iloc") - 4
    size, start = struct.unpack_from(">I", data, at)[0], data.index(b"mdat") + 4
    total = len(data) - start

    def with_pieces(*pieces: tuple[int, int]) -> bytes:
        shift = 8 * (len(pieces) - 1)
        body = b"".join(struct.pack(">II", start + shift + place, length) for place, length in pieces)
        box = data[at + 4 : at + size - 10] + struct.pack(">H", len(pieces)) + body
        out = data[:at] + struct.pack(">I", len(box) + 4) + box + data[at + size :]
        meta = out.index(b"meta") - 4
        return edited(out, meta, ">I", struct.unpack_from(">I", out, meta)[0] + shift)

    assert pixels(with_pieces((0, total))) == pixels(data)
    assert pixels(with_pieces((0, 20), (20, total - 20))) == pixels(data)
    refused(with_pieces((0, total), *[(0, total)] * 60), "bytes in items of several pieces")


def test_many_boxes_and_units():
    data = avif(64, 48)
    refused(data + b"\0\0\0\x08free" * 10_000, "boxes, the limit is 10000")
    assert pixels(data + b"\0\0\0\x08free" * 9_000) == pixels(data)
    padding = unit(15, b"") * 10_000
    length = len(av1_of(data))
    place = data.index(struct.pack(">I", length), data.index(b"iloc"))
    refused(edited(data + padding, place, ">I", length + len(padding)), "units of AV1 data, the limit is 10000")


def test_limits_of_other_pictures_hold(monkeypatch):
    data = avif(1000, 800)
    assert pixels(data, DecodeLimits(max_image_pixels=800_000))
    refused(data, "1000x800 = 800000 pixels; the limit is 799999", LARGE)
    assert pixels(data, LIMITS)
