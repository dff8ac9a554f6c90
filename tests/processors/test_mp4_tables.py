"""Headers of MP4 files that promise more than there is, and ordinary ones."""

from __future__ import annotations

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from processors.video.decoding import Clip
from processors.video.mp4_tables import CompressedHeaderError, promised_entries
from processors.video.options import VideoLimits
from tests.processors.clips import make_clip, with_matrix
from vlmserve_common.errors import BadRequestError

MANY = 2**31
MOST = 10**6


def box(name, *parts):
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), name) + body


def full(name, *numbers, version=0, rest=b""):
    return box(name, bytes([version, 0, 0, 0]), struct.pack(f">{len(numbers)}I", *numbers), rest)


def handler(kind):
    return full(b"hdlr", 0, rest=kind + bytes(13))


def track(*tables, kind=b"vide", edits=b""):
    return box(b"trak", edits, box(b"mdia", handler(kind), box(b"minf", box(b"stbl", *tables))))


def movie(*parts, after=b""):
    return box(b"ftyp", b"isom", bytes(4)) + box(b"moov", *parts) + box(b"mdat", bytes(100)) + after


SIZES = full(b"stsz", 1, MANY)
EVEN = full(b"stts", 1, MANY, 1)


@pytest.mark.parametrize(
    "data",
    [
        movie(track(SIZES)),
        movie(track(full(b"stz2", 8, MANY))),
        movie(SIZES),
        movie(box(b"udta", SIZES)),
        movie(track(box(b"stsd", b"whatever" + SIZES))),
        movie(*[track(full(b"stsz", 1, 60_000), EVEN)] * 20),
        movie(track(full(b"stsz", 1, 1000), edits=box(b"edts", full(b"elst", 2000)))),
        movie(after=box(b"moof", box(b"traf", full(b"trun", MANY)))),
        movie(after=box(b"moof", *[box(b"traf", full(b"trun", 60_000))] * 20)),
        movie() + struct.pack(">I4sQ", 1, b"moof", 16 + len(full(b"trun", MANY))) + full(b"trun", MANY),
        movie() + struct.pack(">I4s", 0, b"moof") + full(b"trun", MANY),
        movie(after=box(b"meta", full(b"iinf", MANY, version=1))),
        movie(after=box(b"meta", box(b"iloc", b"\2\0\0\0\x44\0", struct.pack(">I", MANY)))),
        # no plain sound
        movie(track(SIZES, EVEN)),
        movie(track(SIZES, full(b"stts", 1, MANY, 2), kind=b"soun")),
        movie(track(SIZES, full(b"stts", 2, 1, 1, MANY, 1), kind=b"soun")),
        movie(track(SIZES, EVEN, full(b"stts", 1, MANY, 2), kind=b"soun")),
        movie(track(SIZES, EVEN, handler(b"vide"), kind=b"soun")),
        movie(box(b"udta", track(SIZES, EVEN, kind=b"soun"))),
        # the box that should hold it ends too early
        movie(box(b"trak")[:4] + b"trak"[:4] + struct.pack(">I4s", 3, b"junk") + SIZES),
    ],
    ids=range(20),
)
def test_promises_are_counted_wherever_they_are(data):
    assert promised_entries(data, MOST) > MOST
    with pytest.raises(BadRequestError, match=r"more than 960000 frames .*--max-video-duration-s") as caught:
        Clip(data, VideoLimits(max_duration_s=2000))
    assert caught.value.code == "video_too_long"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        movie(track(SIZES, EVEN, kind=b"soun")),
        movie(track(full(b"stsz", 0, 1000), edits=box(b"edts", full(b"elst", 900)))),
        movie() + box(b"mdat", SIZES) + box(b"free", SIZES) + box(b"skip", SIZES),
        movie() + struct.pack(">I4s", 5, b"moof") + full(b"trun", MANY),  # FFmpeg reads no more here, either
        movie(after=box(b"meta", full(b"iinf", 2**16 + 9), full(b"iloc", 2**16))),  # 16 bits each
    ],
    ids=range(7),
)
def test_what_is_no_promise(data):
    assert promised_entries(data, MOST) < MOST


def test_a_packed_header():
    data = movie(box(b"cmov", bytes(40)))
    with pytest.raises(CompressedHeaderError):
        promised_entries(data, MOST)
    with pytest.raises(BadRequestError, match=r"compressed \(cmov\)"):
        Clip(data, VideoLimits())


@pytest.mark.parametrize("flags", ["", "frag_keyframe+empty_moov", "frag_every_frame+empty_moov"])
@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_ordinary_files(flags, container):
    data = make_clip(100, container=container, container_options={"movflags": flags} if flags else {})
    assert 100 <= promised_entries(data, MOST) <= 1000
    assert Clip(data, VideoLimits()).info.num_frames == 100
    assert promised_entries(data, 99) > 99


def test_a_film_with_uncompressed_sound():
    """80 s of it have more samples than two hours may have frames."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as box_:
        pictures = box_.add_stream("mjpeg", rate=Fraction(1, 8))
        pictures.width, pictures.height, pictures.pix_fmt = 64, 64, "yuvj420p"
        sound = box_.add_stream("pcm_s16le", rate=48000, layout="mono")
        for number in range(10):
            box_.mux(pictures.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")))
            heard = av.AudioFrame.from_ndarray(np.zeros((1, 8 * 48000), np.int16), format="s16", layout="mono")
            heard.rate, heard.pts = 48000, number * 8 * 48000
            box_.mux(sound.encode(heard))
        box_.mux(pictures.encode(None))
        box_.mux(sound.encode(None))
    limits = VideoLimits(max_duration_s=100)
    assert 2 * 240 * limits.max_duration_s < 80 * 48000
    assert file.getvalue().count(struct.pack(">II", 2, 80 * 48000)) == 1, "its sizes are one number"
    assert Clip(file.getvalue(), limits).info.num_frames == 10


def test_an_edit_or_two_do_no_harm():
    assert Clip(with_matrix(make_clip(30), (1, 0, 0, 1)), VideoLimits(max_duration_s=4)).info.num_frames == 30
