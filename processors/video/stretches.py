"""Splits a clip into stretches that are decoded side by side: each begins at a keyframe and needs no other stretch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate, pairwise

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
