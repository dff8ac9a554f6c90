"""Where frames come from: a file that is played at its speed, a camera of this machine, or a stream's address."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import av

from processors.video.pulling import thinned
from vlmserve.commands.client.live import jpeg
from vlmserve_common.errors import VlmserveError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DEVICE = re.compile(r"/dev/video\d+")
_TIMEOUT_S = 10.0


class SourceError(VlmserveError):
    """A source cannot be opened, or has no video."""


def play(
    source: str,
    take: Callable[[float, bytes], None],
    ended: threading.Event,
    *,
    fps: float,
    speed: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read a source to its end, and give its frames to `take` as JPEG files with their times, in seconds.

    At most `fps` frames a second are given. A file is played `speed` times as fast as it was made. `ended`: stops it.
    Raises SourceError.
    """
    live = bool(_ADDRESS.match(source) or _DEVICE.fullmatch(source))
    if not live and not Path(source).is_file():
        raise SourceError(f"{source!r} is no file, no device such as /dev/video0, and no address such as rtsp://...")
    try:
        with av.open(
            source, format="v4l2" if _DEVICE.fullmatch(source) else None, timeout=_TIMEOUT_S if live else None
        ) as container:
            if not container.streams.video:
                raise SourceError(f"{source!r} has no video")
            began = clock()
            frames = takewhile(lambda _: not ended.is_set(), container.decode(container.streams.video[0]))
            for at, frame in thinned(frames, fps, clock):
                if not live and ended.wait(max(0.0, began + at / speed - clock())):
                    return
                take(at, jpeg(frame.to_image()))
    except av.FFmpegError as error:
        raise SourceError(f"{source!r} cannot be played: {error.strerror or error}") from None
