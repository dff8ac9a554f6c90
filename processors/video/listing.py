"""Lists a clip's frames from its packets. Only the first frame is decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from processors.formats import INVALID_VIDEO
from processors.video.video_file import MAX_RATE, VideoFile, broken
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipListing:
    """A clip's frames.

    `pts`, `keys`: times of all shown frames and of keyframes, in ticks, ascending. `tick`: in seconds. `rate`: average
    frames per second. `first`: the first frame, decoded.
    """

    pts: list[int]
    keys: list[int]
    tick: float
    rate: float
    first: VideoFrame


def list_frames(
    file: VideoFile, container: InputContainer, stream: VideoStream, check_time: Callable[[], None]
) -> ClipListing:
    """List the frames of a file that was just opened. `check_time`: raises when it takes too long. Raises
    BadRequestError."""
    limit = file.limits.max_duration_s
    declared = (container.duration or 0) / av.time_base
    # Matroska's duration is the time of its end, wherever it begins.
    before = max(0, container.start_time or 0) / av.time_base if file.format == "matroska" else 0.0
    if declared - before > limit:
        raise _too_long(declared - before, limit)
    if stream.time_base is None:
        raise broken("its video has no clock")
    tick = float(stream.time_base)
    ticks = {one.index: float(one.time_base or 0) for one in container.streams}
    pts: set[int] = set()
    keys: set[int] = set()
    ends = 0.0  # of any stream, in seconds
    first: VideoFrame | None = None
    end = b""  # the last packet of a GIF, which goes on to the end of the file
    latest, lasts = -math.inf, 0  # the time of the last frame and how long it is shown, in ticks
    for packet in container.demux():
        check_time()
        if first is None and packet.stream is stream:
            first = next(iter(stream.decode(packet)), None)
        at = packet.pts if packet.pts is not None else packet.dts
        if at is None or packet.size == 0:
            continue
        ends = max(ends, (at + (packet.duration or 0)) * ticks.get(packet.stream_index, 0.0))
        if packet.stream is not stream or _is_hidden(stream, packet):
            continue
        if file.format == "gif":
            end = bytes(packet)
        if packet.is_keyframe:
            keys.add(at)
        if packet.is_discard:  # decoded and not shown: what an edit list leaves out
            continue
        if at >= latest:
            latest, lasts = at, packet.duration or 0
        if keys:  # nothing before the first keyframe can be decoded
            pts.add(at)
        if len(pts) > limit * MAX_RATE:
            raise BadRequestError(
                f"the clip has more than {len(pts) - 1} frames, {MAX_RATE} for each of the {limit:g} s allowed "
                "(setting --max-video-duration-s)",
                code="video_too_long",
            )
    first_key = min(keys, default=0)
    times = sorted(at for at in pts if at >= first_key)
    if not times:
        raise BadRequestError("the video file holds no frames", code=INVALID_VIDEO)
    measured = (times[-1] - times[0]) * tick
    if measured > limit:
        raise _too_long(measured, limit)
    if file.format == "gif":
        if b"\0;" not in end:
            raise broken("it lacks its end mark")
    elif declared - ends > 0.5 + 0.05 * declared:
        raise broken(f"its header promises {declared:.2f} s, its data end after {ends:.2f} s; it may be cut off")
    rate = float(stream.average_rate or stream.guessed_rate or 24)
    if file.format == "matroska":
        rate = _matroska_rate(rate, [at * tick for at in times], lasts * tick)
    if first is None:
        raise broken(f"its frame 0 of {len(times)} cannot be decoded")
    return ClipListing(pts=times, keys=sorted(keys), tick=tick, rate=rate, first=first)


def _matroska_rate(told: float, times: Sequence[float], lasts: float) -> float:
    """Return the frames per second of a Matroska or WebM file.

    `told`: the header's rate, or FFmpeg's guess from the first few frames if the header has none. It is kept if it
    agrees with the clip's length to a frame and a half. `times`: seconds of each frame. `lasts`: seconds that the last
    frame is shown, 0 if unknown.
    """
    if len(times) < 2:
        return told
    lasts = min(lasts, max(after - before for before, after in pairwise(times)))
    seconds = times[-1] - times[0] + lasts
    if abs(len(times) / told - seconds) <= 1.5 / told:
        return told
    return len(times) / seconds  # as torchcodec's average_fps


def _is_hidden(stream: VideoStream, packet: av.Packet) -> bool:
    """Return True for VP8's alternate reference frames: packets that show nothing (RFC 6386, section 9.1)."""
    return stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10


def _too_long(seconds: float, limit: float) -> BadRequestError:
    return BadRequestError(
        f"the clip is {seconds:.1f} s long; the limit is {limit:g} s (setting --max-video-duration-s)",
        code="video_too_long",
    )
