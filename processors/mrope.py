"""M-RoPE: every prompt token's position in time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1).

Text advances all three together. A block of pad tokens (a picture, a video, or one temporal patch of a Qwen3-VL video)
starts at the next free position: time runs along its temporal patches, height and width along its merged grid. The
token after the block starts at the largest position used so far plus one, including time. That is the published rule.
transformers 5.23 continues at max(height, width) instead (`time_counts=False`). The two differ only after a Qwen2-VL or
Qwen2.5-VL video that has more positions in time than in height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSpan:
    """A contiguous block of pad tokens, [start, start + t*h*w) in the expanded prompt.

    `grid`: (t, h, w) in tokens, after the spatial merge. `time_interval`: positions between temporal patches.
    """

    start: int
    grid: tuple[int, int, int]
    time_interval: float = 1.0

    @property
    def end(self) -> int:
        """One past the last token."""
        t, h, w = self.grid
        return self.start + t * h * w


def mrope_positions(length: int, spans: Sequence[MediaSpan], *, time_counts: bool = True) -> tuple[np.ndarray, int]:
    """Return positions int64 [3, length] (time, height, width) of a prompt, and its position delta.

    `spans`: in prompt order, not overlapping. `time_counts`: True if the token after a block also starts after the
    block's last time. The token generated at index i has position i + delta in all three, after all positions of the
    prompt. Raises ValueError when the spans do not fit the prompt.
    """
    positions = np.empty((3, length), np.int64)
    at = 0  # tokens done
    position = 0  # next free position
    for span in spans:
        if not at <= span.start < span.end <= length:
            raise ValueError(f"media span [{span.start}, {span.end}) overlaps, is empty or exceeds {length} tokens")
        positions[:, at : span.start] = np.arange(position, position + span.start - at)
        position += span.start - at
        t, h, w = span.grid
        block = positions[:, span.start : span.end].reshape(3, t, h, w)
        # float32, then cut off: the reference's arithmetic, which counts when seconds are not whole.
        times = (np.arange(t, dtype=np.float32) * np.float32(span.time_interval)).astype(np.int64)
        block[0] = position + times[:, None, None]
        block[1] = position + np.arange(h)[:, None]
        block[2] = position + np.arange(w)
        position += max(int(times[-1]) if time_counts else 0, h - 1, w - 1) + 1
        at = span.end
    positions[:, at:] = np.arange(position, position + length - at)
    return positions, int(positions.max(initial=-1)) + 1 - length
