"""Opens a video file in memory by PyAV, within limits, and lists its frames. The content decides its format."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from processors.formats import INVALID_VIDEO, file_format, first_bytes
from processors.formats import words as plain_words
from processors.video.options import VideoLimits
from vlmserve_common.errors import BadRequestError

MAX_RATE = 240
"""Frames per second of the fastest clip. Together with the duration it bounds the list of frames."""


class VideoFile:
    """A video file. Raises BadRequestError if it is none. `format`: FFmpeg's name of its format."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self.data = data
        self.limits = limits
        self.format = _format_of(data)

    @contextlib.contextmanager
    def open(self, threads: int) -> Iterator[tuple[InputContainer, VideoStream]]:
        """Open the video stream, to be decoded by so many threads. Several can be open at a time.

        Raises BadRequestError, also for errors of FFmpeg inside the `with` block.
        """
        # max_pixels makes FFmpeg refuse frames before it allocates them.
        options = {"max_pixels": str(self.limits.max_frame_pixels)}
        try:
            with av.open(
                io.BytesIO(self.data), "r", format=self.format, options=options, metadata_errors="replace"
            ) as container:
                stream = _video_stream(container)
                if stream.codec_context is None:
                    raise BadRequestError("the video's codec is not supported", code=INVALID_VIDEO)
                check_frame_size(stream.width, stream.height, self.limits)
                stream.codec_context.options = options
                stream.thread_type = "AUTO"
                stream.codec_context.thread_count = threads
                yield container, stream
        except av.error.ArgumentError as error:  # what FFmpeg says of frames above max_pixels
            raise BadRequestError(
                f"the video's frames have more than {self.limits.max_frame_pixels} pixels, the limit (setting "
                "--max-video-frame-pixels), or their size is not valid",
                code="video_too_large",
            ) from error
        except av.FFmpegError as error:
            raise broken(words(error)) from error


def check_frame_size(width: int, height: int, limits: VideoLimits) -> None:
    """Raise BadRequestError for a frame above the limit."""
    if width * height > limits.max_frame_pixels:
        raise BadRequestError(
            f"a video of {width}x{height} = {width * height} pixels a frame; the limit is {limits.max_frame_pixels} "
            "(setting --max-video-frame-pixels)",
            code="video_too_large",
        )


def broken(why: str) -> BadRequestError:
    """Return the error of a file that is damaged or incomplete."""
    return BadRequestError(f"the video is broken or cut off: {why}", code=INVALID_VIDEO)


def words(error: Exception) -> str:
    """Return the words of an FFmpeg error."""
    return getattr(error, "strerror", None) or plain_words(error)


def _format_of(data: bytes) -> str:
    if not data:
        raise BadRequestError("the video is empty (zero bytes)", code=INVALID_VIDEO)
    found = file_format(data)
    if found is not None and found.ffmpeg is not None and found.kind != "sound":
        return found.ffmpeg
    if found is not None and found.kind == "picture":
        what = f"the data is {found.called}, not a video: send it in a part of type image_url, or image"
        raise BadRequestError(f"{what}; frames go as a list into a part of type video", code=INVALID_VIDEO)
    which = f"it is {found.called}" if found else f"it begins with {first_bytes(data)}"
    raise BadRequestError(
        f"the data is not a video of a supported format (MP4, MOV, WebM, Matroska, GIF); {which}", code=INVALID_VIDEO
    )


def _video_stream(container: InputContainer) -> VideoStream:
    """Return the first video stream that is not a cover."""
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if streams:
        return streams[0]
    cover = ", only a picture of its cover" if container.streams.video else ""
    raise BadRequestError(f"the video file has no video stream{cover}", code=INVALID_VIDEO)


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
