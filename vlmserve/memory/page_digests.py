"""Names for cached prefixes that mean the same in every process: a digest for each page, of all up to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from blake3 import blake3

MediaIdentity: TypeAlias = Callable[[int], bytes]
"""What a media pad value stands for, in bytes that are the same in every process. KeyError for one unknown."""


def page_digests(key: np.ndarray, before: bytes, *, page_size: int, identity: MediaIdentity) -> Iterator[bytes]:
    """Digests (32 bytes) of the whole pages of a key, which goes on from a prefix of whole pages. before: the digest
    of that, or of the namespace."""
    for at in range(0, len(key) - page_size + 1, page_size):
        page = np.array(key[at : at + page_size], dtype="<i8")
        digest = blake3(before)
        pads, places = np.unique(page[page < 0], return_index=True)
        for place in np.sort(places):  # of media, in their order on this page
            pad = int(page[page < 0][place])
            name = identity(pad)
            digest.update(len(name).to_bytes(8, "little") + name)
        # pad values by that order, too
        order = {int(pads[i]): -1 - rank for rank, i in enumerate(np.argsort(places))}
        page[page < 0] = [order[int(pad)] for pad in page[page < 0]]
        digest.update(len(pads).to_bytes(8, "little") + page.tobytes())
        before = digest.digest()
        yield before


def namespace_digest(namespace: bytes) -> bytes:
    """The digest before the first page."""
    return blake3(b"namespace\n" + namespace).digest()
