"""Names of media and prefixes: pad values, the negative ids of media in prefix cache keys, and digests of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from blake3 import blake3

from processors.inputs import MultimodalInputs

MediaKey: TypeAlias = tuple[bytes, str, tuple[int, int, int], float]
"""One of `MultimodalDataItem.patch_keys`: a temporal patch's content digest, modality, patch grid, seconds per grid."""

MediaIdentity: TypeAlias = Callable[[int], bytes]
"""Names a pad value's medium in bytes that are the same in every process. KeyError for an unknown one."""


class MediaKeyTable:
    """Gives each media key an id of its own. No id is ever given to a second key, so a stale id in a cache matches
    nothing else.

    max_keys: the table is large with more keys than this, and more than twice as many as the last `retain` left.
    """

    def __init__(self, max_keys: int = 4096) -> None:
        self._min_limit = self._limit = max_keys
        self._ids: dict[MediaKey, int] = {}
        self._keys: dict[int, MediaKey] = {}
        self._next = -1

    def __len__(self) -> int:
        return len(self._ids)

    def intern(self, media_key: MediaKey) -> int:
        """Return the pad value of a media key: negative, and the same until `retain` drops the key."""
        pad_value = self._ids.get(media_key)
        if pad_value is None:
            pad_value = self._ids[media_key] = self._next
            self._keys[pad_value] = media_key
            self._next -= 1
        return pad_value

    def identity(self, pad_value: int) -> bytes:
        """Return the media key of a pad value, as bytes that are the same in every process. KeyError for a dropped
        one."""
        return repr(self._keys[pad_value]).encode()

    @property
    def is_large(self) -> bool:
        """Whether it is time to `retain`; seldom enough to cost next to nothing."""
        return len(self._ids) > self._limit

    def retain(self, live: set[int]) -> None:
        """Forget all keys whose pad value is not in `live`.

        A forgotten key gets a new pad value next time. Prefixes that are cached under the old one are not found again,
        which costs a hit and is never wrong.
        """
        self._ids = {key: pad_value for key, pad_value in self._ids.items() if pad_value in live}
        self._keys = {pad_value: key for key, pad_value in self._ids.items()}
        self._limit = max(self._min_limit, 2 * len(self._ids))


def embeds_key(digests: np.ndarray, table: MediaKeyTable) -> np.ndarray:
    """Return the prefix cache key of a prompt of embeddings: int64 [L], negative. digests: uint8 [L, 32], of each
    row."""
    return np.array([table.intern((row.tobytes(), "embeds", (1, 1, 1), 0.0)) for row in digests], dtype=np.int64)


def radix_key(input_ids: np.ndarray, mm_inputs: MultimodalInputs | None, table: MediaKeyTable) -> np.ndarray:
    """Return the prefix cache key of a prompt: int64 [L], a copy of `input_ids` with the tokens of each temporal patch
    set to its pad value. So a video shares the prefix of one that begins with the same frames.

    Raises ValueError for an id below 0, which could pass for a medium, and for a range outside of the prompt.
    """
    key = np.array(input_ids, dtype=np.int64)
    if (key < 0).any():
        raise ValueError(f"token id {int(key.min())} is negative")
    for item in mm_inputs.items if mm_inputs is not None else ():
        for start, end in item.offsets:
            if not 0 <= start <= end <= len(key):
                raise ValueError(f"media range {start}..{end} is outside of a prompt of {len(key)} tokens")
        pads = np.array([table.intern(one) for one in item.patch_keys], dtype=np.int64)
        pads = np.repeat(pads, item.patch_tokens)
        done = 0
        for start, end in item.offsets:
            key[start:end] = pads[done : done + end - start]
            done += end - start
    return key


def page_digests(key: np.ndarray, before: bytes, *, page_size: int, identity: MediaIdentity) -> Iterator[bytes]:
    """Yield a digest (32 bytes) for each whole page of a key. It names all tokens up to the page's end.

    before: the digest of the whole pages before the key, or of the namespace.
    """
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
    """Return the digest that comes before the first page."""
    return blake3(b"namespace\n" + namespace).digest()
