"""Video bytes to the RGB frames that are used, through PyAV. The content decides the format.

A clip is read twice: once without decoding, for the times of all its frames and its keyframes, and once decoding what
the chosen frames need, in stretches side by side where that is worth it. Frames come one at a time, so memory holds a
few of them however long the clip is.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from processors import h264
from processors.clip_stretches import SEEK_GAP, stretches
from processors.display_matrix import orientation
from processors.gif_structure import is_whole_gif
from processors.mp4_tables import CompressedHeaderError, promised_entries
from processors.video_formats import video_format
from processors.video_options import VideoLimits
from vlmserve.common.errors import BadRequestError

_CODE = "invalid_video"
_STRETCHES = 4
_USUAL_BITS = 12  # of a pixel, 8 bits of each colour, these shared by four pixels
_MAX_RATE = 240  # frames a second of the fastest clip: together with its duration it bounds the list of frames


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipInfo:
    """A clip as it is shown. width, height: of an upright frame, in pixels. rate: average frames per second.

    times: seconds of each frame from the start of the file, in order.
    """

    width: int
    height: int
    rate: float
    times: tuple[float, ...]

    @property
    def num_frames(self) -> int:
        """Frames in the file."""
        return len(self.times)


class Clip:
    """One clip, its frames listed. Raises BadRequestError when it is broken or over the limits.

    clock: seconds, for the limit on decoding.
    """

    def __init__(self, data: bytes, limits: VideoLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._data = data
        self._limits = limits
        self._clock = clock
        self._deadline = clock() + limits.max_decode_s
        self._called_off = False
        self._format = _format_of(data)
        if self._format == "mov":
            self._check_tables()
        with self._open(threads=1) as (container, stream):
            self._pts, self._keys, rate, seconds_per_tick, first = self._scan(container, stream)
        self._pixel_bits = first.format.padded_bits_per_pixel
        # Sizes and rotation are believed from here: headers may say anything.
        check_frame_size(first.width, first.height, limits)
        width, height = first.width, first.height
        if orientation(first).transposed:
            width, height = height, width
        start = self._pts[0]
        self.info = ClipInfo(
            width=width,
            height=height,
            rate=rate,
            times=tuple((pts - start) * seconds_per_tick for pts in self._pts),
        )

    def stretches(self, indices: Sequence[int], multiple: int) -> list[range]:
        """Ranges of places in `indices` (ascending) that are worth decoding side by side, in order; all but the last
        hold a multiple of `multiple`."""
        keys = [bisect.bisect_left(self._pts, key) for key in self._keys]
        # Not as many as there are threads: what a damaged clip shows behind the damage depends on where decoding began,
        # and should not depend on the machine.
        return stretches(indices, keys, multiple=multiple, most=_STRETCHES)

    @property
    def threads(self) -> int:
        """That decode, together. Each may keep up to 17 frames: one of the largest allowed, or several where frames are
        smaller; of 10 bits without subsampling a frame counts four times."""
        room = self._limits.max_frame_pixels * _USUAL_BITS // (self.info.width * self.info.height * self._pixel_bits)
        return max(1, min(self._limits.decode_threads, room))

    def read(self, indices: Sequence[int], threads: int = 1) -> Generator[np.ndarray, None, None]:
        """The frames of these indices (ascending): uint8 [height, width, 3], upright, each for as long as it is used.

        threads: that decode. Raises BadRequestError at the first that cannot be decoded. Several threads may read at a
        time.
        """
        wanted = sorted(set(indices))
        reformatter = VideoReformatter()  # making one takes as long as reformatting a frame of 720p
        pictures = self._walk([self._pts[index] for index in wanted], threads)
        at, picture = -1, None
        for index in indices:
            if picture is None or index != at:
                at, picture = index, self._to_rgb(next(pictures), reformatter)
            yield picture

    def call_off(self) -> None:
        """Whatever is being read ends soon, with an error."""
        self._called_off = True

    def _walk(self, targets: list[int], threads: int) -> Iterator[VideoFrame]:
        """One frame for each time in `targets`, seeking where that saves work."""
        done = 0
        try:
            for frame in self._decode(targets, threads, seek=True):
                yield frame
                done += 1
        except _LostError:
            # A file whose index leads astray: all frames up to the last one, then.
            yield from self._decode(targets[done:], threads, seek=False)

    def _decode(self, targets: list[int], threads: int, *, seek: bool) -> Iterator[VideoFrame]:
        with self._open(threads) as (container, stream):
            wanted = frozenset(targets)
            frames = self._frames(container, stream, wanted)
            reached = -1  # index of the latest frame decoded
            for target in targets:
                index = bisect.bisect_left(self._pts, target)
                key = self._keys[bisect.bisect_right(self._keys, target) - 1]
                if seek and bisect.bisect_left(self._pts, key) > reached + SEEK_GAP:
                    try:
                        container.seek(key, stream=stream, backward=True, any_frame=False)
                    except av.FFmpegError as error:
                        raise _LostError from error
                    frames = self._frames(container, stream, wanted)
                found = next((frame for frame in frames if frame.pts is not None and frame.pts >= target), None)
                if found is None or found.pts != target:
                    if seek:
                        raise _LostError
                    raise _broken(f"its frame {index} of {len(self._pts)} cannot be decoded")
                reached = index
                yield found

    def _frames(self, container: InputContainer, stream: VideoStream, wanted: Collection[int]) -> Iterator[VideoFrame]:
        """The frames from here on, as they are shown; those that nothing refers to only where they are wanted."""
        # HEVC has no such frames: what is no reference there may be one for frames of a higher temporal layer.
        prefix = h264.length_size(stream.codec_context.extradata) if stream.codec_context.name == "h264" else 0
        for packet in container.demux(stream):
            self._check_time()
            # To leave them out is quicker than the decoder's own way (skip_frame), where they take up its threads.
            needed = packet.pts is None or packet.pts in wanted or not prefix
            if needed or not h264.is_disposable(bytes(packet), prefix):
                yield from packet.decode()

    def _check_tables(self) -> None:
        """FFmpeg believes a header's tables while it opens the file, before any other limit counts."""
        most = 2 * int(self._limits.max_duration_s * _MAX_RATE)
        try:
            entries = promised_entries(self._data, most)
        except CompressedHeaderError:
            raise _broken("its header is compressed (cmov), which is not supported") from None
        if entries > most:
            raise BadRequestError(
                f"the video's header promises more than {most} frames and samples, {2 * _MAX_RATE} for each of the "
                f"{self._limits.max_duration_s:g} s allowed (setting --max-video-duration-s)",
                code="video_too_long",
            )

    def _check_time(self) -> None:
        if self._called_off:
            raise _CalledOffError
        if self._clock() > self._deadline:
            raise BadRequestError(
                f"decoding the video takes longer than {self._limits.max_decode_s:g} s, the limit (setting "
                "--max-video-decode-s): cut it, or encode it anew, smaller or with more keyframes",
                code="video_too_costly",
            )

    def _to_rgb(self, frame: VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
        check_frame_size(frame.width, frame.height, self._limits)
        if frame.is_corrupt:
            raise _broken(f"its frame at {frame.time:.3f} s is damaged")
        try:
            picture = reformatter.reformat(frame, format="rgb24", threads=1)
        except (av.FFmpegError, ValueError) as error:
            raise _broken(_words(error)) from error
        plane = picture.planes[0]  # lives as long as the array
        lines = np.frombuffer(memoryview(plane), np.uint8).reshape(picture.height, plane.line_size)
        rgb = lines[:, : 3 * picture.width].reshape(picture.height, picture.width, 3)
        return np.ascontiguousarray(orientation(frame).apply(rgb))

    @contextlib.contextmanager
    def _open(self, threads: int) -> Iterator[tuple[InputContainer, VideoStream]]:
        # max_pixels makes FFmpeg refuse frames before it allocates them.
        options = {"max_pixels": str(self._limits.max_frame_pixels)}
        try:
            with av.open(
                io.BytesIO(self._data), "r", format=self._format, options=options, metadata_errors="replace"
            ) as container:
                stream = _video_stream(container)
                if stream.codec_context is None:
                    raise BadRequestError("the video's codec is not supported", code=_CODE)
                check_frame_size(stream.width, stream.height, self._limits)
                stream.codec_context.options = options
                stream.thread_type = "AUTO"
                stream.codec_context.thread_count = threads
                yield container, stream
        except av.error.ArgumentError as error:  # what FFmpeg says of frames above max_pixels
            raise BadRequestError(
                f"the video's frames have more than {self._limits.max_frame_pixels} pixels, the limit (setting "
                "--max-video-frame-pixels), or their size is not valid",
                code="video_too_large",
            ) from error
        except av.FFmpegError as error:
            raise _broken(_words(error)) from error

    def _scan(
        self, container: InputContainer, stream: VideoStream
    ) -> tuple[list[int], list[int], float, float, VideoFrame]:
        """Times of all frames and of keyframes in ticks, both ascending; frames per second; seconds in a tick; the
        first frame, the only one decoded."""
        limit = self._limits.max_duration_s
        declared = (container.duration or 0) / av.time_base
        # Matroska's duration is the time of its end, wherever it begins.
        before = max(0, container.start_time or 0) / av.time_base if self._format == "matroska" else 0.0
        if declared - before > limit:
            raise _too_long(declared - before, limit)
        if stream.time_base is None:
            raise _broken("its video has no clock")
        tick = float(stream.time_base)
        ticks = {one.index: float(one.time_base or 0) for one in container.streams}
        pts: set[int] = set()
        keys: set[int] = set()
        ends = 0.0  # of any stream, in seconds
        first: VideoFrame | None = None
        latest, lasts = -math.inf, 0  # the time of the last frame and how long it is shown, in ticks
        for packet in container.demux():
            self._check_time()
            if first is None and packet.stream is stream:
                first = next(iter(stream.decode(packet)), None)
            at = packet.pts if packet.pts is not None else packet.dts
            if at is None or packet.size == 0:
                continue
            ends = max(ends, (at + (packet.duration or 0)) * ticks.get(packet.stream_index, 0.0))
            if packet.stream is not stream or _is_hidden(stream, packet):
                continue
            if packet.is_keyframe:
                keys.add(at)
            if packet.is_discard:  # decoded and not shown: what an edit list leaves out
                continue
            if at >= latest:
                latest, lasts = at, packet.duration or 0
            if keys:  # nothing before the first keyframe can be decoded
                pts.add(at)
            if len(pts) > limit * _MAX_RATE:
                raise BadRequestError(
                    f"the clip has more than {len(pts) - 1} frames, {_MAX_RATE} for each of the {limit:g} s allowed "
                    "(setting --max-video-duration-s)",
                    code="video_too_long",
                )
        first_key = min(keys, default=0)
        times = sorted(at for at in pts if at >= first_key)
        if not times:
            raise BadRequestError("the video file holds no frames", code=_CODE)
        measured = (times[-1] - times[0]) * tick
        if measured > limit:
            raise _too_long(measured, limit)
        if self._format == "gif":
            if not is_whole_gif(self._data):
                raise _broken("it lacks its end mark")
        elif declared - ends > 0.5 + 0.05 * declared:
            raise _broken(f"its header promises {declared:.2f} s, its data end after {ends:.2f} s; it may be cut off")
        rate = float(stream.average_rate or stream.guessed_rate or 24)
        if self._format == "matroska":
            rate = _matroska_rate(rate, [at * tick for at in times], lasts * tick)
        if first is None:
            raise _broken(f"its frame 0 of {len(times)} cannot be decoded")
        return times, sorted(keys), rate, tick, first


class _LostError(Exception):
    """A seek did not lead to the frame looked for."""


class _CalledOffError(Exception):
    """Nobody wants the frames any more."""


def check_frame_size(width: int, height: int, limits: VideoLimits) -> None:
    """Raises BadRequestError for a frame above the limit."""
    if width * height > limits.max_frame_pixels:
        raise BadRequestError(
            f"a video of {width}x{height} = {width * height} pixels a frame; the limit is {limits.max_frame_pixels} "
            "(setting --max-video-frame-pixels)",
            code="video_too_large",
        )


def _format_of(data: bytes) -> str:
    if not data:
        raise BadRequestError("the video is empty (zero bytes)", code=_CODE)
    found = video_format(data)
    if found is not None:
        return found
    raise BadRequestError(
        f"the data is not a video of a supported format (MP4, MOV, WebM, Matroska, GIF); it begins with {data[:8]!r}",
        code=_CODE,
    )


def _video_stream(container: InputContainer) -> VideoStream:
    """The first one that is no cover."""
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if streams:
        return streams[0]
    cover = ", only a picture of its cover" if container.streams.video else ""
    raise BadRequestError(f"the video file has no video stream{cover}", code=_CODE)


def _matroska_rate(told: float, times: Sequence[float], lasts: float) -> float:
    """Frames per second of a Matroska or WebM file, whose header says how long one frame lasts, or nothing, when FFmpeg
    guesses from the first few. That stands where it agrees with the clip's length to a frame and a half.

    times: seconds of each frame. lasts: seconds that the last one is shown, 0 where nothing says so.
    """
    if len(times) < 2:
        return told
    lasts = min(lasts, max(after - before for before, after in pairwise(times)))
    seconds = times[-1] - times[0] + lasts
    if abs(len(times) / told - seconds) <= 1.5 / told:
        return told
    return len(times) / seconds  # as torchcodec's average_fps


def _is_hidden(stream: VideoStream, packet: av.Packet) -> bool:
    """VP8's alternate reference frames are packets of their own that show nothing (RFC 6386, section 9.1)."""
    return stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10


def _too_long(seconds: float, limit: float) -> BadRequestError:
    return BadRequestError(
        f"the clip is {seconds:.1f} s long; the limit is {limit:g} s (setting --max-video-duration-s)",
        code="video_too_long",
    )


def _broken(why: str) -> BadRequestError:
    return BadRequestError(f"the video is broken or cut off: {why}", code=_CODE)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
