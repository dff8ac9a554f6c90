"""Pictures and clips to measure processors with. Drawn from a seed, so that every run has the same bytes."""

from __future__ import annotations

import io
import math
from fractions import Fraction

import numpy as np
from PIL import Image


def scene(width: int, height: int, seed: int) -> np.ndarray:
    """uint8 [height, width, 3]: soft colours with grain on them, so that files are about as large as photographs."""
    rng = np.random.default_rng(seed)
    soft = Image.fromarray(rng.integers(0, 256, (9, 16, 3), dtype=np.uint8)).resize((width, height), 3)
    return (np.asarray(soft, np.int16) + rng.integers(-9, 10, (height, width, 3))).clip(0, 255).astype(np.uint8)


def jpeg(width: int, height: int, seed: int) -> bytes:
    """A JPEG file."""
    file = io.BytesIO()
    Image.fromarray(scene(width, height, seed)).save(file, "JPEG", quality=90)
    return file.getvalue()


def clip(width: int, height: int, *, seconds: int, rate: int) -> bytes:
    """An MP4 file in H.264, with x264's default settings. A tenth is encoded, a camera circling over a scene, and
    repeated."""
    import av

    margin = 64
    big = scene(width + 2 * margin, height + 2 * margin, 0)
    count, file = max(1, seconds * rate // 10), io.BytesIO()
    with av.open(file, "w", format="mp4") as box:
        stream = box.add_stream("libx264", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        packets = []
        for number in range(count):
            angle = 2 * math.pi * number / count
            x, y = (round(margin * (1 + part)) for part in (math.cos(angle), math.sin(angle)))
            pixels = np.ascontiguousarray(big[y : y + height, x : x + width])
            packets += stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
        packets += stream.encode(None)
        step = round(count / rate / packets[0].time_base)
        for turn in range(10):
            for packet in packets:
                again = av.Packet(bytes(packet))  # what is muxed is gone
                again.stream, again.time_base, again.duration = stream, packet.time_base, packet.duration
                assert packet.pts is not None
                assert packet.dts is not None
                again.pts, again.dts = packet.pts + turn * step, packet.dts + turn * step
                again.is_keyframe = packet.is_keyframe
                box.mux(again)
    return file.getvalue()
