"""M-RoPE: every prompt token's position in time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1).

Text advances all three together. A block of pad tokens (a picture, a video, or one temporal patch of a Qwen3-VL video)
starts at the next free position: time runs along its temporal patches, height and width along its merged grid. The
token after the block starts at the largest position of its grid plus one, including time. That is the published rule.
transformers 5.23 continues at max(height, width) instead (`time_counts=False`). The two differ only after a Qwen2-VL or
Qwen2.5-VL video that has more positions in time than in height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSpan:
    """A contiguous block of pad tokens, [start, start + t*h*w) in the expanded prompt.

    `grid`: (t, h, w) in tokens, after the spatial merge. `time_interval`: positions between temporal patches. `mask`:
    bool [t * h * w], the places of the grid that have a token; None if all have one. `first`: the number of the first
    temporal patch. `skipped`: positions before the block that nothing has.
    """

    start: int
    grid: tuple[int, int, int]
    time_interval: float = 1.0
    mask: np.ndarray | None = None
    first: int = 0
    skipped: int = 0

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + (math.prod(self.grid) if self.mask is None else int(self.mask.sum()))


def grid_positions(grid: tuple[int, int, int], time_interval: float, first: int = 0) -> np.ndarray:
    """Return the positions int64 [3, t*h*w] of a block of pad tokens, counted from its start. Arguments as in
    `MediaSpan`."""
    t, h, w = grid
    block = np.empty((3, t, h, w), np.int64)
    # float32, then cut off: the reference's arithmetic, which counts when seconds are not whole.
    block[0] = (np.arange(first, first + t, dtype=np.float32) * np.float32(time_interval)).astype(np.int64)[
        :, None, None
    ]
    block[1] = np.arange(h)[:, None]
    block[2] = np.arange(w)
    return block.reshape(3, -1)


def mrope_positions(length: int, spans: Sequence[MediaSpan], *, time_counts: bool = True) -> tuple[np.ndarray, int]:
    """Return positions int64 [3, length] (time, height, width) of a prompt, and its position delta.

    `spans`: in prompt order, not overlapping. `time_counts`: True if the token after a block also starts after the
    block's last time. The token generated at index i has position i + delta in all three, after all positions of the
    prompt. Raises ValueError when the spans do not fit the prompt.
    """
    text = np.broadcast_to(np.arange(length), (3, length))
    parts: list[tuple[int, np.ndarray]] = []  # where each begins, and the positions in it
    at = 0  # tokens done
    position = 0  # next free position
    for span in spans:
        end = span.end
        if not at <= span.start < end <= length:
            raise ValueError(f"media span [{span.start}, {end}) overlaps, is empty or exceeds {length} tokens")
        parts.append((position, text[:, : span.start - at]))
        position += span.start - at + span.skipped
        make = _patch_positions if span.grid[0] == 1 else _block_positions
        block, taken = make(span.grid, span.time_interval, span.first, time_counts)
        parts.append((position, block if span.mask is None else block[:, span.mask]))
        position += taken
        at = end
    parts.append((position, text[:, : length - at]))
    starts, blocks = zip(*parts, strict=True)
    positions = np.concatenate(blocks, axis=1) + np.repeat(starts, [block.shape[1] for block in blocks])
    # the end of a block whose last places have no token counts, too
    return positions, max(position + length - at, int(positions.max(initial=-1)) + 1) - length


def _block_positions(
    grid: tuple[int, int, int], time_interval: float, first: int, time_counts: bool
) -> tuple[np.ndarray, int]:
    """Return the positions of a block, and how many it takes."""
    block = grid_positions(grid, time_interval, first)
    return block, int(block[0 if time_counts else 1 :].max()) + 1


# A clip has hundreds of equal temporal patches, and a live video is expanded again with each one that comes.
_patch_positions = lru_cache(32)(_block_positions)
