"""Which tokens of a prompt stay when a part of its conversation leaves."""

from __future__ import annotations

import numpy as np

from processors.families.base import ExpandedPrompt


def known_tokens(prompt: ExpandedPrompt) -> np.ndarray:
    """Return the ids of a prompt, int64 [L]; tokens of media have negative ones, which stand for the arrays in memory.
    So equal frames of one video differ."""
    ids, media = prompt
    known = ids.copy()
    for item in media.items if media is not None else ():
        arrays = item.parts or (item.feature,)
        marks = np.repeat([-id(array) for array in arrays], len(item.patch_digests) // len(arrays))
        tokens, done = np.repeat(marks, item.patch_tokens), 0
        for start, end in item.offsets:
            known[start:end] = tokens[done : done + end - start]
            done += end - start
    return known


def kept_places(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the places in `before` of the first tokens of `after`, which lacks one run of them: int64, of all tokens,
    or of those before the run if more has changed."""
    length, gone = min(len(before), len(after)), len(before) - len(after)
    ahead, behind = before[:length] == after[:length], before[::-1][:length] == after[::-1][:length]
    head, tail = (length if equal.all() else int(equal.argmin()) for equal in (ahead, behind))
    if gone < 0 or head + tail < len(after):
        return np.arange(head)
    head = len(after) - tail
    return np.concatenate([np.arange(head), np.arange(head + gone, len(before))])
