"""Short clips for tests, made with PyAV: every frame shows its own number, so that a wrong one is noticed."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
from PIL import Image


def frame(number: int, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: two bars whose places, and a ground whose colour, tell the number."""
    y, x = np.mgrid[:height, :width]
    picture = np.empty((height, width, 3), np.uint8)
    picture[..., 0] = 40 + (number * 7) % 200
    picture[..., 1] = (x * 3 + number * 5) % 200 // 2
    picture[..., 2] = (y * 2 + number * 11) % 256 // 2
    picture[:, (number * 5) % width :][:, :4] = 255
    picture[(number * 3) % height :][:4] = 0
    return picture


def _remembered(make: Callable[..., bytes]) -> Callable[..., bytes]:
    """The same clips are asked for again and again, for each family; to encode one takes longer than most tests."""
    made: dict[str, bytes] = {}

    @functools.wraps(make)
    def ask(*args: object, **options: object) -> bytes:
        key = repr((args, sorted(options.items())))
        if key not in made:
            made[key] = make(*args, **options)
        return made[key]

    return ask


@_remembered
def make_clip(
    frames: int = 12,
    *,
    width: int = 112,
    height: int = 84,
    fps: Fraction | int = 10,
    codec: str = "libx264rgb",
    container: str = "mp4",
    times: list[int] | None = None,
    gop: int = 12,
    first: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """A clip's bytes. libx264rgb is lossless here: frames come back exactly. times: of each frame, in milliseconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, container_options=container_options or {}) as box:
        stream = box.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = width, height
        if codec == "libx264rgb":
            stream.pix_fmt = "rgb24"
            stream.options = {"crf": "0", "preset": "ultrafast", "bf": "2"}
        elif codec == "gif":
            stream.pix_fmt = "rgb8"
        else:
            stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            picture = av.VideoFrame.from_ndarray(frame(first + number, width, height), format="rgb24")
            if times is not None:
                picture.pts, picture.time_base = times[number], Fraction(1, 1000)
            box.mux(stream.encode(picture.reformat(format=stream.pix_fmt) if codec != "libx264rgb" else picture))
        box.mux(stream.encode(None))
    return file.getvalue()


def decode_all(data: bytes) -> tuple[np.ndarray, float]:
    """All frames uint8 [T, H, W, 3], one after the other, and the average rate: the plain way to read a clip."""
    with av.open(io.BytesIO(data)) as box:
        stream = box.streams.video[0]
        frames = np.stack([picture.to_ndarray(format="rgb24") for picture in box.decode(stream)])
        return frames, float(stream.average_rate or stream.guessed_rate or 24)


def with_rotation(data: bytes, degrees: int) -> bytes:
    """An MP4 with a display matrix that turns it clockwise when shown, as cameras write it."""
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    return with_matrix(data, (cos, sin, -sin, cos))


def with_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 whose point (x, y) is shown at (a*x + c*y, b*x + d*y); matrix: a, b, c, d."""
    a, b, c, d = (part << 16 for part in matrix)
    turned = bytearray(data)
    at = turned.index(b"tkhd") + 4 + 40  # version 0: the matrix is 40 bytes into the box
    struct.pack_into(">9i", turned, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(turned)


def jpeg(number: int, width: int = 112, height: int = 84) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame(number, width, height)).save(file, "JPEG")
    return file.getvalue()
