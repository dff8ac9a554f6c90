"""A clip as the reference reads it: every frame decoded, one after the other, by PyAV alone.

Nothing of our own reader is used, nor transformers' PyAV reader: that one goes by the number of frames in the header,
which WebM and Matroska have not, and which in MP4 counts frames that an edit list leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np


def length_of(path: Path) -> tuple[int, float]:
    """How many frames are shown, and of them a second, on average. Found by decoding the whole clip, which memory need
    not hold."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        count, first, end = 0, 0.0, 0.0
        for frame in container.decode(stream):
            at = frame.time or 0.0
            first = at if count == 0 else first
            end = at + float((frame.duration or 0) * (frame.time_base or 0))
            count += 1
        if "matroska" in container.format.name and end > first:  # WebM is a kind of it
            # Its header has no number of frames to take an average of. `average_fps` of torchcodec, from a scan.
            return count, count / (end - first)
        return count, float(stream.average_rate or stream.guessed_rate or 24)


def read_frames(path: Path, indices: Sequence[int]) -> np.ndarray:
    """uint8 [len(indices), H, W, 3], upright. indices: ascending, and may repeat."""
    found = {}
    with av.open(str(path)) as container:
        for number, frame in zip(range(indices[-1] + 1), container.decode(video=0), strict=False):
            if number in indices:
                turns = round(frame.rotation / 90)  # counterclockwise, as a player shows it
                found[number] = np.rot90(frame.to_ndarray(format="rgb24"), turns)
    return np.stack([found[index] for index in indices])
