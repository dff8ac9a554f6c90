"""A process that opens the stream of a camera and sends its frames: strangers may have made what it reads."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vlmserve_common.process.child import Parent
from vlmserve_common.process.limits import ProcessLimits, allow_cpu_time, confine

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

FRAME, END = struct.Struct("<BdII"), b"\0"
"""A message is a frame (kind 2, its time, width and height, then RGB), or the end and why it has come."""
RGB = 2
_SCHEMES = {"rtsp": "rtsp,rtp,udp,tcp", "rtsps": "rtsps,rtsp,rtp,srtp,udp,tcp,tls", "http": "http,tcp"}
_SCHEMES["https"] = "https,http,tls,tcp"
SCHEMES = frozenset(_SCHEMES)
# no playlists, which open other addresses
_FORMATS = "mpegts,mov,mp4,matroska,webm,flv,mpjpeg,h264"
_OPEN_S, _READ_S = 10.0, 20.0
_CPU_S = 20.0  # from one frame that is used to the next
_FIXED_BYTES, _BYTES_PER_PIXEL = 2**30, 128  # as of media workers


def run_puller(parent: Parent, url: str, fps: float, max_frame_pixels: int) -> None:
    """Open an address, report that it is open, and send at most `fps` of its frames a second, until it ends."""
    import av  # here: the parent imports this module, too, and does without

    confine(ProcessLimits(memory_bytes=_FIXED_BYTES + _BYTES_PER_PIXEL * max_frame_pixels))
    allow_cpu_time(_CPU_S)
    scheme = urlsplit(url).scheme.lower()
    options = {"protocol_whitelist": _SCHEMES[scheme], "max_pixels": str(max_frame_pixels)}
    options |= {"rtsp_transport": "tcp"} if scheme.startswith("rtsp") else {"format_whitelist": _FORMATS}
    try:
        with av.open(url, options=options, timeout=(_OPEN_S, _READ_S)) as container:
            if not container.streams.video:
                parent.failed("it has no video", for_user=True)
                return _wait()
            stream = container.streams.video[0]
            stream.codec_context.options = {"max_pixels": str(max_frame_pixels)}
            parent.ready({})
            for at, frame in thinned(container.decode(stream), fps):
                rgb = frame.to_ndarray(format="rgb24")
                parent.send(FRAME.pack(RGB, at, rgb.shape[1], rgb.shape[0]) + rgb.tobytes())
                allow_cpu_time(_CPU_S)
        parent.send(END + b"it has ended")
    except av.FFmpegError as error:
        why = error.strerror or type(error).__name__
        if parent.was_told:
            parent.send(END + why.encode())
        else:
            parent.failed(why, for_user=True)
    return _wait()


def thinned(
    frames: Iterable[VideoFrame], fps: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[float, VideoFrame]]:
    """Yield at most `fps` of the frames a second, each behind its seconds since the first one. clock: for streams that
    have no times."""
    first: float | None = None
    last: float | None = None
    for at, frame in _timed(frames, clock):
        first = at if first is None else first
        at -= first
        if last is None or (at - last) * fps >= 1 - 0.05:
            last = at
            yield at, frame


def _timed(frames: Iterable[VideoFrame], clock: Callable[[], float]) -> Iterator[tuple[float, VideoFrame]]:
    """Yield frames behind their seconds, all by one clock: the stream's, or ours. The second frame says which. In a
    stream with times, frames without any are left out: the first one of RTSP has none."""
    ours: bool | None = None
    held: tuple[float, VideoFrame] | None = None
    for frame in frames:
        if ours is None and (frame.time is not None or held is not None):
            ours = frame.time is None
            if ours and held is not None:
                yield held
        if ours:
            yield clock(), frame
        elif frame.time is not None:
            yield frame.time, frame
        else:
            held = clock(), frame
    if ours is None and held is not None:
        yield held


def _wait() -> None:
    """Stay until the parent has read what was sent, and ends this process."""
    while True:
        time.sleep(3600)
