"""Decodes frames of an H.264 stream that comes picture by picture, from a keyframe on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from processors.formats import INVALID_VIDEO
from processors.video.options import VideoLimits
from processors.video.video_file import broken, check_frame_size, words
from vlmserve_common.errors import BadRequestError


def decode_units(units: Sequence[bytes], wanted: Sequence[int], limits: VideoLimits) -> Iterator[np.ndarray]:
    """Yield the frames of some access units (ITU-T H.264, annex B), uint8 [height, width, 3], in order.

    units: the first one, and each one behind which a frame depends on nothing before it, is a keyframe with its
    parameter sets. wanted: numbers of units, ascending. Raises BadRequestError for a unit that is broken.
    """
    decoder = VideoCodecContext.create("h264", "r")
    decoder.options = {"max_pixels": str(limits.max_frame_pixels)}
    decoder.thread_count = 1
    reformatter, deadline = VideoReformatter(), time.monotonic() + limits.max_decode_s
    left, last = set(wanted), wanted[-1]
    found: dict[int, np.ndarray] = {}
    try:
        for number, unit in enumerate([*units[: last + 1], None]):
            if time.monotonic() > deadline:
                raise BadRequestError(
                    f"decoding the stream takes longer than {limits.max_decode_s:g} s, the limit (setting "
                    "--max-video-decode-s)",
                    code="video_too_costly",
                )
            packet = None
            if unit is not None:
                packet = av.Packet(unit)
                packet.pts = packet.dts = number
            for frame in decoder.decode(packet):
                if frame.pts in left:
                    left.remove(frame.pts)
                    found[frame.pts] = _rgb(frame, reformatter, limits)
    except av.FFmpegError as error:
        raise BadRequestError(f"the H.264 stream is broken: {words(error)}", code=INVALID_VIDEO) from error
    if left:
        raise broken(f"{len(left)} of its frames cannot be decoded; a stream begins with a keyframe")
    return iter([found[number] for number in wanted])


def _rgb(frame: VideoFrame, reformatter: VideoReformatter, limits: VideoLimits) -> np.ndarray:
    check_frame_size(frame.width, frame.height, limits)
    if frame.is_corrupt:
        raise broken("one of its frames is damaged")
    return reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
