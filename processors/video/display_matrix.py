"""Which way up a video's frames are shown: its display matrix (ISO/IEC 14496-12, section 6.2.2)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from av.sidedata.sidedata import SideData
from av.video.frame import VideoFrame


@dataclass(frozen=True, slots=True)
class Orientation:
    """What brings a stored frame upright: rows and columns change places, then either may be turned around."""

    transposed: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    def apply(self, picture: np.ndarray) -> np.ndarray:
        """[H, W, channels] as it is stored -> as it is shown, a view."""
        if self.transposed:
            picture = picture.transpose(1, 0, 2)
        return picture[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


def orientation(frame: VideoFrame) -> Orientation:
    """To the nearest quarter turn, mirrored or not. A matrix that leads nowhere counts as none."""
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
