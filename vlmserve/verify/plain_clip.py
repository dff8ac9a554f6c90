"""A clip as the reference reads it: every frame decoded, one after the other, by PyAV alone.

Nothing of our own reader is used, nor transformers' PyAV reader: that one goes by the number of frames in the header,
which WebM and Matroska have not, and which in MP4 counts frames that an edit list leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """frames: as many as are shown. rate: of them a second, on average."""

    frames: int
    rate: float


def length_of(path: Path) -> Length:
    """Found by decoding the whole clip, which memory need not hold."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        count, first, end = 0, 0.0, 0.0
        for frame in container.decode(stream):
            at = frame.time or 0.0
            first = at if count == 0 else first
            end = at + float((frame.duration or 0) * (frame.time_base or 0))
            count += 1
        rate = float(stream.average_rate or stream.guessed_rate or 24)
        if _is_matroska(container) and end > first:
            # Its header has no number of frames to take an average of. `average_fps` of torchcodec, from a scan.
            rate = count / (end - first)
        return Length(frames=count, rate=rate)


def read_frames(path: Path, indices: Sequence[int]) -> np.ndarray:
    """uint8 [len(indices), H, W, 3], upright. indices: ascending, and may repeat."""
    wanted = set(indices)
    with av.open(str(path)) as container:
        found = dict(_upright(container, wanted))
    return np.stack([found[index] for index in indices])


def _upright(container: InputContainer, wanted: set[int]) -> Iterator[tuple[int, np.ndarray]]:
    for number, frame in enumerate(container.decode(video=0)):
        if number in wanted:
            yield number, np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame))
        if number >= max(wanted):
            return


def _quarter_turns(frame: VideoFrame) -> int:
    """Counterclockwise, as a player shows it."""
    return round(frame.rotation / 90)


def _is_matroska(container: InputContainer) -> bool:
    """WebM is a kind of it."""
    return "matroska" in container.format.name
