"""Caches embeddings of temporal patches in memory, by key: on the device, and behind it in host memory.

A tier is an LRU under a byte limit. Entries that are in use, or will be soon, are held and stay. Entries that the
device evicts go to the host, and come back when they are found there. On a CPU both are the same memory, so one tier is
enough.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from vision.cache.stats import TierStats
from vlmserve_common.compute.transfers import to_device


class MemoryTier:
    """key -> embeddings [n, width]. Holds at most `limit_bytes`, or all held entries if these are more."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes = limit_bytes
        self.device = device
        self.bytes = self.held_bytes = 0
        self._entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._held: set[bytes] = set()
        self._hits = self._misses = self._evictions = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def touch(self, key: bytes) -> bool:
        """Return True if the embeddings are here, and make them the most recently used. Counts as a hit or miss."""
        if key not in self._entries:
            self._misses += 1
            return False
        self._hits += 1
        self._entries.move_to_end(key)
        return True

    def embeds(self, key: bytes) -> torch.Tensor:
        """Return embeddings that are here, without counting. Raises KeyError if they are not."""
        return self._entries[key]

    def put(self, key: bytes, embeds: torch.Tensor) -> list[tuple[bytes, torch.Tensor]]:
        """Add new embeddings; return the evicted ones. Embeddings larger than the limit are evicted themselves."""
        assert key not in self._entries, key.hex()
        self._entries[key] = embeds
        self.bytes += embeds.nbytes
        if key in self._held:
            self.held_bytes += embeds.nbytes
        return self._trim(key)

    def pop(self, key: bytes) -> torch.Tensor:
        """Take out embeddings that are here, held or not."""
        embeds = self._entries.pop(key)
        self.bytes -= embeds.nbytes
        if key in self._held:
            self.held_bytes -= embeds.nbytes
        return embeds

    def hold(self, key: bytes) -> None:
        """Keep the embeddings until `let_go`, whether they are here now or come later."""
        assert key not in self._held, key.hex()
        self._held.add(key)
        if key in self._entries:
            self.held_bytes += self._entries[key].nbytes

    def let_go(self, key: bytes) -> list[tuple[bytes, torch.Tensor]]:
        """Undo `hold`, and return the entries evicted by that. The key counts as just used. Raises KeyError without a
        `hold`."""
        self._held.remove(key)
        if key not in self._entries:
            return []
        self.held_bytes -= self._entries[key].nbytes
        self._entries.move_to_end(key)
        return self._trim(key)

    def stats(self) -> TierStats:
        return TierStats(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            bytes=self.bytes,
            held_bytes=self.held_bytes,
            entries=len(self._entries),
        )

    def _trim(self, newest: bytes) -> list[tuple[bytes, torch.Tensor]]:
        """Evict entries that are not held until the limit is kept.

        If `newest` alone exceeds the limit, it goes. Otherwise the least recently used go.
        """
        gone = []
        if self._entries[newest].nbytes > self.limit_bytes and newest not in self._held:
            gone.append(newest)
        else:
            excess = self.bytes - self.limit_bytes
            for key, embeds in self._entries.items():
                if excess <= 0:
                    break
                if key not in self._held:
                    gone.append(key)
                    excess -= embeds.nbytes
        self._evictions += len(gone)
        return [(key, self.pop(key)) for key in gone]


class EmbeddingCache:
    """The device's tier, with the host's behind it if there is one. Not thread-safe."""

    def __init__(self, device: MemoryTier, host: MemoryTier | None = None) -> None:
        self.device = device
        self.host = host

    def find(self, key: bytes) -> bool:
        """Return True if a held key has embeddings. They are then on the device."""
        if self.device.touch(key):
            return True
        if self.host is None or not self.host.touch(key):
            return False
        self.add(key, self.host.pop(key))
        return True

    def add(self, key: bytes, embeds: torch.Tensor) -> None:
        """Add embeddings from any device under a new key."""
        self._pass_on(self.device.put(key, to_device(embeds, self.device.device)))

    def embeds(self, key: bytes) -> torch.Tensor:
        """Return embeddings that are on the device. Raises KeyError otherwise."""
        return self.device.embeds(key)

    def hold(self, key: bytes) -> None:
        """Keep the embeddings of `key` on the device, once they are there, until `let_go` or `drop`."""
        self.device.hold(key)

    def let_go(self, key: bytes) -> None:
        self._pass_on(self.device.let_go(key))

    def drop(self, key: bytes) -> None:
        """Undo `hold`, and forget the embeddings in every tier."""
        self.device.pop(key)
        self.device.let_go(key)

    def _pass_on(self, gone: list[tuple[bytes, torch.Tensor]]) -> None:
        if self.host is not None:
            for key, embeds in gone:
                self.host.put(key, _on_host(embeds))


def _on_host(embeds: torch.Tensor) -> torch.Tensor:
    """Copy to page-locked memory. A GPU copies in order, so a later copy back finds the bytes."""
    if not embeds.is_cuda:
        return embeds.cpu()
    host = torch.empty(embeds.shape, dtype=embeds.dtype, pin_memory=True)
    return host.copy_(embeds, non_blocking=True)
