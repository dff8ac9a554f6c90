"""What was lately sent to which replica: about what their caches hold, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MOST_KEYS = 2**17
"""Some 20 MiB; prefixes of 4 million tokens."""


class KnownKeys:
    """Keys, and the replicas that each was sent to. The least recently sent ones are forgotten first.

    size: number of replicas. most: keys that are kept.
    """

    def __init__(self, size: int, *, most: int = MOST_KEYS) -> None:
        self._everybody = (1 << size) - 1
        self._size = size
        self._most = most
        self._replicas: OrderedDict[bytes, int] = OrderedDict()  # a bit for each replica

    def __len__(self) -> int:
        return len(self._replicas)

    def longest(self, prefix: Sequence[bytes]) -> list[int]:
        """How many keys from the first one on each replica has without a gap."""
        lengths, left = [0] * self._size, self._everybody
        for number, key in enumerate(prefix, 1):
            left &= self._replicas.get(key, 0)
            if not left:
                break
            for replica in range(self._size):
                if left >> replica & 1:
                    lengths[replica] = number
        return lengths

    def has(self, key: bytes, replica: int) -> bool:
        """Whether the key was sent there."""
        return bool(self._replicas.get(key, 0) >> replica & 1)

    def sent(self, keys: Iterable[bytes], replica: int) -> None:
        """These are the replica's now. The last key is forgotten first: without it those before it are still of use."""
        for key in reversed(list(keys)):
            self._replicas[key] = self._replicas.get(key, 0) | 1 << replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def clear(self) -> None:
        """Nobody has anything any more."""
        self._replicas.clear()
