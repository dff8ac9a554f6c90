"""Fewer tokens for what repeats: places of a picture or clip that are left out, and how many tokens a clip keeps.

A place is a group of merge x merge patches that become one token. Places go row by row in a temporal patch. There are
two ways, which a request or the server chooses:

- Exact repeats. A place whose pixels all equal those of its four neighbours leaves before the tower, which encodes
  fewer patches: the rim of each area of one colour stays. In a clip, a place that equals the same place of the temporal
  patch before leaves behind the tower: an object that moves is encoded together with what it moves on.
- A clip's places that change least leave behind the tower, by the measure of EVS (Efficient Video Sampling,
  arXiv:2510.14624). The rate settles how many tokens each temporal patch keeps. Which ones these are is known once
  embeddings are there: see `vision.change`.

Rotary positions stay those of the full grid in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from processors.hashing import kept_digest

MOST_PRUNING = 0.99
"""The largest rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """What leaves a medium. `skip_repeats`: exact repeats. `rate`: the share of a clip's tokens that leaves by EVS's
    measure, 0 to MOST_PRUNING; with a rate, exact repeats of a clip stay."""

    skip_repeats: bool = False
    rate: float = 0.0


NOTHING_LEAVES = Pruning()


BEFORE, STAYS, BEHIND = 0, 1, 2
"""Whether a place leaves before the tower, stays, or leaves behind the tower: the values of `kept`."""


def places_left(feature: np.ndarray, grid_thw: tuple[int, int, int], merge: int) -> np.ndarray:
    """Return uint8 [t, places of a temporal patch]: what becomes of each place. One place of each temporal patch stays.

    `feature`: uint8 [t * h * w, pixels of a patch], in the order of `processors.resize.frames_to_patches`.
    """
    t, rows, columns = grid_thw[0], grid_thw[1] // merge, grid_thw[2] // merge
    places = feature.reshape(t, rows, columns, -1)
    if places.shape[-1] % 8 == 0:  # compared eight at a time
        places = places.view(np.uint64)
    left = np.full((t, rows, columns), STAYS, np.uint8)
    before = None
    for part, now in zip(left, places, strict=True):
        if before is not None:
            part[(now == before).all(-1)] = BEHIND
        down, right = (now[1:] == now[:-1]).all(-1), (now[:, 1:] == now[:, :-1]).all(-1)
        if min(rows, columns) > 2:
            inner = down[:-1, 1:-1] & down[1:, 1:-1] & right[1:-1, :-1] & right[1:-1, 1:]
            part[1:-1, 1:-1][inner] = BEFORE
        if not (part == STAYS).any():
            part[0, 0] = STAYS
        before = now
    return left.reshape(t, -1)


def without_repeats(
    feature: np.ndarray,
    grid_thw: tuple[int, int, int],
    digests: Sequence[bytes],
    merge: int,
    allocate: Callable[[tuple[int, ...], type[np.uint8]], np.ndarray],
) -> tuple[tuple[bytes, ...], np.ndarray, tuple[bytes, ...]]:
    """Leave exact repeats out: return `kept` of `MultimodalDataItem`, and the feature and the digests of what is
    encoded.

    `feature`: as of `places_left`. `digests`: of each temporal patch. `allocate`: makes a smaller feature. Without
    repeats, the feature and the digests are the given ones, and `kept` is empty.
    """
    left = places_left(feature, grid_thw, merge)
    if (left == STAYS).all():
        return (), feature, tuple(digests)
    encoded = left != BEFORE
    # of a temporal patch that is encoded whole, the embeddings are those of any other clip with it
    own = tuple(
        digest if part.all() else kept_digest(digest, part.tobytes())
        for digest, part in zip(digests, encoded, strict=True)
    )
    if not encoded.all():
        patches = np.flatnonzero(np.repeat(encoded.reshape(-1), merge**2))
        smaller = allocate((len(patches), feature.shape[1]), np.uint8)
        feature = np.take(feature, patches, axis=0, out=smaller, mode="clip")
    return tuple(part.tobytes() for part in left), feature, own


def kept_counts(patches: int, places: int, rate: float) -> tuple[int, ...]:
    """Return how many tokens each of a clip's `patches` temporal patches keeps, of `places` each.

    They are all of the first one. The others share what is left of (1 - rate) of all tokens evenly, and each keeps one
    token at least. Returns () if all stay.
    """
    rest = patches - 1
    wanted = max(int(patches * places * (1 - rate)) - places, 0)
    if rate <= 0 or not rest or wanted >= rest * places:
        return ()
    shares = (max(wanted * (n + 1) // rest - wanted * n // rest, 1) for n in range(rest))
    return (places, *shares)


def grid_mask(places: int, patches: int, kept: Sequence[bytes] = (), counts: Sequence[int] = ()) -> np.ndarray | None:
    """Return bool [patches, places]: the places of a clip that have a token; None if all have one.

    `kept`: as in `MultimodalDataItem`. `counts`: so many tokens of each temporal patch are chosen later; until then
    they stand at its first places.
    """
    if kept:
        return np.stack([np.frombuffer(part, np.uint8) for part in kept]) == STAYS
    if counts:
        mask: np.ndarray = np.arange(places) < np.asarray(counts)[:, None]
        return mask
    return None
