"""Decodes the RGB frames that are used from video bytes, through PyAV.

A clip is read twice. The first time nothing is decoded: the times of all frames and the keyframes are listed. The
second time the chosen frames are decoded, in stretches side by side if that is faster. A stretch begins at a keyframe
and needs no other stretch. Frames come one at a time, so memory holds a few of them, however long the clip is.
"""

from __future__ import annotations

import bisect
import struct
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import SideData
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from processors.video.frame_choice import ClipInfo
from processors.video.options import VideoLimits
from processors.video.video_file import VideoFile, broken, check_frame_size, list_frames, words
from vlmserve_common.errors import BadRequestError

_STRETCHES = 4
_GIF_FRAMES = 256  # of the largest allowed: some 20 s
_USUAL_BITS = 12  # of a pixel, 8 bits of each colour, these shared by four pixels


_SLICE = range(1, 6)  # types of units that hold a part of a picture (ITU-T H.264, table 7-1)
_TELLS_NOTHING = frozenset({6, 9, 12})  # additional information, delimiters and filling: nothing later depends on them


SEEK_GAP = 8  # frames: to decode that many is about as quick as to seek
_OPENING = 12  # frames that are decoded in the time that it takes to open the file


def stretches(indices: Sequence[int], keys: Sequence[int], *, multiple: int, most: int) -> list[range]:
    """Return ranges of places in `indices` (ascending frames of a clip), in order.

    There are at most `most`, about equally long to decode, and no more than are worth a decoder of their own. `keys`:
    the clip's keyframes, ascending; the first is frame 0. `multiple`: all ranges except the last hold a multiple of
    this.
    """
    alone = [index - _key(keys, index) + 1 for index in indices]  # frames to decode for that one only
    after = [0, *(_step(before, index, keys) for before, index in pairwise(indices))]  # ... with the one before done
    done = list(accumulate(after))

    def cost(part: range) -> int:
        return alone[part[0]] + done[part[-1]] - done[part[0]]

    def split(count: int) -> list[range]:
        """Start each stretch where little is decoded twice, near its even share."""
        starts = [0]
        for number in range(1, count):
            wanted = (alone[0] + done[-1]) * number / count - alone[0]
            places = range(starts[-1] + multiple, len(indices), multiple)

            def off(place: int, wanted: float = wanted) -> float:
                return abs(done[place] - wanted) + alone[place] - after[place]

            if places:
                starts.append(min(places, key=off))
        return [range(start, end) for start, end in pairwise([*starts, len(indices)])]

    found = [split(count) for count in range(1, most + 1)]
    return min(found, key=lambda parts: max(map(cost, parts)) + _OPENING * len(parts))


def _key(keys: Sequence[int], index: int) -> int:
    return keys[bisect.bisect_right(keys, index) - 1]


def _step(before: int, index: int, keys: Sequence[int]) -> int:
    key = _key(keys, index)
    return index - (key if key > before + SEEK_GAP else before + 1) + 1


class Clip:
    """One clip with its frames listed. Raises BadRequestError when it is broken or over the limits.

    `clock`: seconds, for the limit on decoding.
    """

    def __init__(self, data: bytes, limits: VideoLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._deadline = clock() + limits.max_decode_s
        self._called_off = False
        self._file = VideoFile(data, limits)
        with self._file.open(threads=1) as (container, stream):
            listing = list_frames(self._file, container, stream, self._check_time)
        self._pts, self._keys, first = listing.pts, listing.keys, listing.first
        self._pixel_bits = first.format.padded_bits_per_pixel
        # Sizes and rotation are believed from here: headers may say anything.
        check_frame_size(first.width, first.height, limits)
        width, height = first.width, first.height
        if self._file.format == "gif":
            _check_gif(len(self._pts), width, height, limits)
        if orientation(first).transposed:
            width, height = height, width
        start = self._pts[0]
        self.info = ClipInfo(
            width=width,
            height=height,
            rate=listing.rate,
            times=tuple((pts - start) * listing.tick for pts in self._pts),
        )

    def stretches(self, indices: Sequence[int], multiple: int) -> list[range]:
        """Return ranges of places in `indices` (ascending) that are worth decoding side by side, in order.

        All but the last hold a multiple of `multiple`.
        """
        # Not as many as there are threads: what a damaged clip shows behind the damage depends on where decoding began,
        # and should not depend on the machine.
        return stretches(indices, self.keys, multiple=multiple, most=_STRETCHES)

    @property
    def keys(self) -> list[int]:
        """The numbers of the keyframes, ascending."""
        return [bisect.bisect_left(self._pts, key) for key in self._keys]

    @property
    def threads(self) -> int:
        """How many threads decode together.

        Each can keep up to 17 frames: one thread for frames of the largest allowed size, several for smaller frames. A
        frame of 10 bits without subsampling counts four times.
        """
        room = self._limits.max_frame_pixels * _USUAL_BITS // (self.info.width * self.info.height * self._pixel_bits)
        return max(1, min(self._limits.decode_threads, room))

    def read(self, indices: Sequence[int], threads: int = 1) -> Generator[np.ndarray, None, None]:
        """Yield the frames of these indices (ascending): uint8 [height, width, 3], upright. Several threads can read at
        a time.

        `threads`: threads that decode. Raises BadRequestError at the first frame that cannot be decoded.
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
        """Let all reading end soon, with an error."""
        self._called_off = True

    def _walk(self, targets: list[int], threads: int) -> Iterator[VideoFrame]:
        """Yield one frame for each time in `targets`, seeking if that saves work."""
        done = 0
        try:
            for frame in self._decode(targets, threads, seek=True):
                yield frame
                done += 1
        except _LostError:
            # A file whose index leads astray: all frames up to the last one, then.
            yield from self._decode(targets[done:], threads, seek=False)

    def _decode(self, targets: list[int], threads: int, *, seek: bool) -> Iterator[VideoFrame]:
        with self._file.open(threads) as (container, stream):
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
                    raise broken(f"its frame {index} of {len(self._pts)} cannot be decoded")
                reached = index
                yield found

    def _frames(self, container: InputContainer, stream: VideoStream, wanted: Collection[int]) -> Iterator[VideoFrame]:
        """Yield the frames from here on, in display order. Frames that no frame refers to are decoded only if they are
        wanted."""
        # HEVC is left out: a frame that is no reference there can be one for frames of a higher temporal layer.
        prefix = length_size(stream.codec_context.extradata) if stream.codec_context.name == "h264" else 0
        for packet in container.demux(stream):
            self._check_time()
            # To leave them out is quicker than the decoder's own way (skip_frame), where they take up its threads.
            needed = packet.pts is None or packet.pts in wanted or not prefix
            if needed or not is_disposable(bytes(packet), prefix):
                yield from packet.decode()

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
            raise broken(f"its frame at {frame.time:.3f} s is damaged")
        try:
            picture = reformatter.reformat(frame, format="rgb24", threads=1)
        except (av.FFmpegError, ValueError) as error:
            raise broken(words(error)) from error
        plane = picture.planes[0]  # lives as long as the array
        lines = np.frombuffer(memoryview(plane), np.uint8).reshape(picture.height, plane.line_size)
        rgb = lines[:, : 3 * picture.width].reshape(picture.height, picture.width, 3)
        return np.ascontiguousarray(orientation(frame).apply(rgb))


def _check_gif(frames: int, width: int, height: int, limits: VideoLimits) -> None:
    """Refuse a GIF with too many pixels. A frame builds on the one before and costs its whole area, even with 20 bytes
    of file."""
    most = _GIF_FRAMES * limits.max_frame_pixels
    if frames * width * height > most:
        raise BadRequestError(
            f"the GIF's {frames} frames of {width}x{height} have {frames * width * height} pixels; the limit is "
            f"{most}, {_GIF_FRAMES} of the largest frames (setting --max-video-frame-pixels)",
            code="video_too_costly",
        )


class _LostError(Exception):
    """A seek did not lead to the wanted frame."""


class _CalledOffError(Exception):
    """The frames are no longer needed."""


@dataclass(frozen=True, slots=True)
class Orientation:
    """How to turn a stored frame upright: swap rows and columns, then flip either."""

    transposed: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    def apply(self, picture: np.ndarray) -> np.ndarray:
        """Turn a picture [H, W, channels] upright; returns a view."""
        if self.transposed:
            picture = picture.transpose(1, 0, 2)
        return picture[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


def orientation(frame: VideoFrame) -> Orientation:
    """Read a frame's display matrix (ISO/IEC 14496-12, section 6.2.2), to the nearest quarter turn, mirrored or not.

    A degenerate matrix counts as none.
    """
    matrix = _matrix(frame)
    if matrix is None:
        return Orientation()
    # A point (x, y) is shown at (x*a + y*c, x*b + y*d).
    a, b, _, c, d = struct.unpack_from("=5i", matrix)
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Orientation(transposed=True, flip_rows=b < 0, flip_columns=c < 0)
    return Orientation(flip_rows=d < 0, flip_columns=a < 0)


def _matrix(frame: VideoFrame) -> bytes | None:
    try:
        data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV stumbles over kinds of data that it does not know
        return None
    return bytes(data) if isinstance(data, SideData) else None


def length_size(extradata: bytes | None) -> int:
    """Return the bytes of the length before each H.264 unit, from the stream's header in MP4, MOV and Matroska (avcC).

    0 if the header is another one.
    """
    return (extradata[4] & 3) + 1 if extradata and len(extradata) > 4 and extradata[0] == 1 else 0


def is_disposable(packet: bytes, prefix: int) -> bool:
    """Return True if an H.264 packet holds one picture that no other picture refers to, and nothing else that matters.

    `prefix`: the value of `length_size`, at least 1. False for a packet that is not understood.
    """
    at, slices = 0, 0
    while at + prefix < len(packet):
        header = packet[at + prefix]
        if header & 31 in _SLICE:
            if header >> 5 & 3:  # nal_ref_idc
                return False
            slices += 1
        elif header & 31 not in _TELLS_NOTHING:
            return False
        at += prefix + int.from_bytes(packet[at : at + prefix], "big")
    return slices > 0 and at == len(packet)
