"""Broken, lying and oversized videos: each is refused with a 400 that says why, or served as what it really holds."""

from __future__ import annotations

import io
import itertools
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from processors.video.decoding import Clip
from processors.video.options import VideoLimits
from tests.processors.clips import decode_all, make_clip
from tests.processors.helpers import decoded_and_growth
from vlmserve_common.errors import BadRequestError

LIMITS = VideoLimits()
MP4 = make_clip(60, gop=10)
WEBM = make_clip(60, codec="libvpx-vp9", container="webm", width=160, height=120)
GIF = make_clip(10, codec="gif", container="gif")


def read_all(data, limits=LIMITS):
    clip = Clip(data, limits)
    return list(clip.read(range(clip.info.num_frames)))


def refused(data, match, limits=LIMITS):
    with pytest.raises(BadRequestError, match=match) as caught:
        read_all(data, limits)
    assert 400 <= caught.value.status < 500
    return caught.value


def overwritten(data, mark, offset, value, layout=">I"):
    """`data` with a number put `offset` bytes behind `mark`."""
    changed = bytearray(data)
    struct.pack_into(layout, changed, data.index(mark) + len(mark) + offset, value)
    return bytes(changed)


def black_clip(width, height, frames=1):
    """Made without the memory and time that drawn frames of that size would take."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as box:
        stream = box.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        black = av.VideoFrame(width, height, "yuv420p")
        for plane in black.planes:
            plane.update(bytes(plane.buffer_size))
        for number in range(frames):
            black.pts = number
            box.mux(stream.encode(black))
        box.mux(stream.encode(None))
    return file.getvalue()


# ---------------------------------------------------------------- no video at all


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "empty"),
        (b"this is not a video", 'not a video of a supported format .* begins with "this is "'),
        (b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", "broken or cut off"),
        (b"\x1aE\xdf\xa3" + bytes(100), "broken or cut off|no video stream|no frames"),
        (b"GIF89a" + bytes(3), "broken or cut off|no video stream|no frames"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "is a PNG picture, not a video: send it in a part of type image_url"),
        (b"RIFF\x10\0\0\0AVI LIST", r"not a video of a supported format .*; it is a video \(AVI\)"),
        (b"<!doctype html><html>", "it is an HTML page"),
        # playlists, which FFmpeg would follow to other files and hosts
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video of a supported format"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video of a supported format"),
    ],
    ids=["empty", "text", "stub", "matroska", "gif", "png", "avi", "page", "hls", "concat"],
)
def test_what_is_no_video(data, match):
    refused(data, match)


def test_a_file_with_sound_only():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as box:
        stream = box.add_stream("aac", rate=16000)
        for index in range(5):
            sound = av.AudioFrame(format="fltp", layout="mono", samples=1024)
            sound.rate, sound.pts = 16000, index * 1024
            for plane in sound.planes:
                plane.update(bytes(plane.buffer_size))
            box.mux(stream.encode(sound))
        box.mux(stream.encode(None))
    refused(file.getvalue(), "no video stream")


# ---------------------------------------------------------------- cut off and damaged


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.8])
@pytest.mark.parametrize("data", [MP4, WEBM, GIF], ids=["mp4", "webm", "gif"])
def test_a_file_that_is_cut_off(data, part):
    refused(data[: int(len(data) * part)], "cut off|no frames|no video stream")


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.sampled_from([MP4, WEBM, GIF]), at=st.floats(0, 1), size=st.integers(1, 4000), byte=st.integers(0, 255))
def test_damage_is_refused_or_got_over_and_nothing_else(data, at, size, byte):
    start = int(at * len(data))
    damaged = data[:start] + bytes([byte]) * size + data[start + size :]
    try:
        frames = read_all(damaged)
    except BadRequestError:
        return
    assert frames


@settings(max_examples=40)
@given(junk=st.binary(max_size=400), head=st.sampled_from([b"\0\0\0 ftypisom", b"\x1aE\xdf\xa3", b"GIF89a", b""]))
def test_junk_is_refused(junk, head):
    with pytest.raises(BadRequestError):
        read_all(head + junk)


# ---------------------------------------------------------------- too long, too large


@pytest.mark.parametrize("behind", [b"", b"\0", b"\0\0\0", b"; not", b"\x2c", b"\x21\xfe"])
def test_a_gif_has_an_end_mark_whatever_comes_behind_it(behind):
    assert len(read_all(GIF + behind)) == len(read_all(GIF))
    for cut in (GIF[:-1], GIF[: GIF.rindex(b";", 0, -1) + 1]):  # the last one ends with the same byte
        refused(cut, "lacks its end mark")


def test_a_gif_of_very_many_frames():
    """Each costs its whole area in a few bytes of the file; the limit is inclusive."""
    clip = make_clip(10, codec="gif", container="gif", width=64, height=48)
    limits = VideoLimits(max_frame_pixels=64 * 48)
    head, frame = clip[:-1], clip[clip.rindex(b"\x21\xf9") : -1]
    assert Clip(head + frame * 246 + b";", limits).info.num_frames == 256
    error = refused(
        head + frame * 247 + b";",
        r"257 frames of 64x48 have 789504 pixels; the limit is 786432, .*\(setting --max-video-frame-pixels\)",
        limits,
    )
    assert error.code == "video_too_costly"


def test_ten_hours_between_frames():
    clip = make_clip(3, times=[0, 1000, 36_000_000], container="matroska", codec="libx264")
    error = refused(clip, r"36000\.\d s long; the limit is 7200 s \(setting --max-video-duration-s\)")
    assert error.code == "video_too_long"
    refused(overwritten(clip, b"\x44\x89\x88", 0, 0.0, ">d"), r"36000\.\d s long")  # its Duration says nothing


def test_one_that_takes_too_long_to_decode():
    """Time passes whenever it is asked for: once a packet, 60 times for the list of frames and 60 to decode them."""
    limits = VideoLimits(max_decode_s=150)
    for speed, within in ((1.0, True), (1.5, False), (3.0, False)):
        clock = itertools.count(1000.0, speed).__next__
        if within:
            assert len(list(Clip(MP4, limits, clock).read(range(60)))) == 60
            continue
        with pytest.raises(
            BadRequestError, match=r"longer than 150 s, the limit \(setting --max-video-decode-s\)"
        ) as caught:
            list(Clip(MP4, limits, clock).read(range(60)))
        assert caught.value.code == "video_too_costly"


def test_more_frames_than_any_camera_takes():
    limits = VideoLimits(max_duration_s=0.2)
    times = list(range(60))  # a frame each millisecond
    refused(make_clip(60, times=times, container="matroska", codec="libx264"), "more than 48 frames", limits)


# ---------------------------------------------------------------- headers are not believed


@pytest.mark.parametrize("seconds", [0, 3600, 36000])
def test_an_mp4s_durations_do_not_matter(seconds):
    lying = overwritten(MP4, b"mvhd", 16, seconds * 1000)
    frames, rate = decode_all(MP4)
    clip = Clip(lying, LIMITS)
    assert (clip.info.num_frames, clip.info.rate) == (60, rate)
    (last,) = clip.read([59])
    assert np.array_equal(last, frames[59])


def test_a_table_of_samples_that_are_not_there():
    refused(overwritten(MP4, b"stsz", 8, 2**20), "cut off|no frames")
    refused(overwritten(MP4, b"stsz", 8, 2**28), "cut off|no frames")


# ---------------------------------------------------------------- memory


def test_memory_does_not_grow_with_the_clip(tmp_path):
    count, grown = decoded_and_growth(black_clip(640, 360, frames=300), "video", tmp_path)  # 198 MiB of RGB
    assert count == 300
    assert grown < 100


def test_a_frame_over_the_limit_is_not_decoded(tmp_path):
    """It comes behind small ones, so that no header tells."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as box:
        stream = box.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuvj420p"
        for number, side in enumerate((64, 64, 64, 9000)):
            jpeg = io.BytesIO()
            Image.new("RGB", (side, side)).save(jpeg, "JPEG")
            packet = av.Packet(jpeg.getvalue())
            packet.stream, packet.time_base = stream, Fraction(1, 10)
            packet.pts = packet.dts = number
            packet.is_keyframe = True
            box.mux(packet)
    refused(file.getvalue(), "--max-video-frame-pixels|cannot be decoded")
    count, grown = decoded_and_growth(file.getvalue(), "video", tmp_path)
    assert count == 0
    assert grown < 60
