"""What packets say of themselves, beside what the decoder makes of them."""

from __future__ import annotations

import io

import av
import pytest

from processors.video.decoding import is_disposable, length_size
from tests.processors.clips import make_clip

SLICE, DISPOSABLE_SLICE, HEADER, INFORMATION = 0x41, 0x01, 0x67, 0x06


def units(*headers: int, prefix: int = 4, size: int = 5) -> bytes:
    return b"".join(size.to_bytes(prefix, "big") + bytes([header]) + bytes(size - 1) for header in headers)


@pytest.mark.parametrize("prefix", [1, 2, 3, 4])
def test_slices_without_references(prefix):
    def disposable(*headers):
        return is_disposable(units(*headers, prefix=prefix), prefix)

    assert disposable(DISPOSABLE_SLICE)
    assert disposable(INFORMATION, DISPOSABLE_SLICE, DISPOSABLE_SLICE)
    assert not disposable(SLICE)
    assert not disposable(DISPOSABLE_SLICE, SLICE)
    assert not disposable(HEADER, DISPOSABLE_SLICE)  # what is set there is for later pictures, too
    assert not disposable(0x07, DISPOSABLE_SLICE)
    assert not disposable(INFORMATION)
    assert not disposable()


def test_what_is_not_understood_is_kept():
    whole = units(DISPOSABLE_SLICE, DISPOSABLE_SLICE)
    assert is_disposable(whole, 4)
    assert not is_disposable(whole[:-1], 4)
    assert not is_disposable(whole + b"\0", 4)
    assert not is_disposable(units(DISPOSABLE_SLICE, size=1)[:3], 4)
    assert not is_disposable(b"\0\0\0\1" + whole, 4)  # with start codes instead of lengths


@pytest.mark.parametrize(
    ("extradata", "size"),
    [
        (None, 0),
        (b"", 0),
        (b"\1\x64\0\x1e", 0),
        (b"\1\x64\0\x1e\xff", 4),
        (b"\1\x64\0\x1e\xfd", 2),
        (b"\0\0\0\1\x67", 0),
    ],
)
def test_length_size(extradata, size):
    assert length_size(extradata) == size


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska"])
def test_a_clip_without_its_disposable_packets(container):
    """The decoder skips the same ones by itself."""
    data = make_clip(40, codec="libx264", container=container, gop=40)

    def frames(skip_frame, keep):
        with av.open(io.BytesIO(data)) as box:
            stream = box.streams.video[0]
            stream.codec_context.skip_frame = skip_frame
            prefix = length_size(stream.codec_context.extradata)
            assert prefix == 4
            packets = (packet for packet in box.demux(stream) if keep(bytes(packet), prefix))
            return {frame.pts: bytes(frame.planes[0]) for packet in packets for frame in packet.decode()}

    left = frames("DEFAULT", lambda packet, prefix: not is_disposable(packet, prefix))
    assert 5 < len(left) < 35
    assert left == frames("NONREF", lambda packet, prefix: True)
    whole = frames("DEFAULT", lambda packet, prefix: True)
    assert len(whole) == 40
    assert left.items() <= whole.items()
