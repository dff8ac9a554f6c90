"""Rows of temporal patches in memory, by key: on the device, and behind it in host memory.

A tier is an LRU under a byte limit whose entries may be held: held rows are in use, or about to be, and stay. What the
device gives up goes to the host; what is found there comes back. On a CPU both are the same memory, and one tier does.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from vision.embedding_stats import TierStats


class MemoryTier:
    """key -> rows [n, width]. Holds `limit_bytes` at the most, or what is held if that is more."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes = limit_bytes
        self.device = device
        self.bytes = self.held_bytes = 0
        self._entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._held: dict[bytes, int] = {}
        self._hits = self._misses = self._evictions = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> torch.Tensor | None:
        """The rows, now the most recently used; None if they are not here. Counts."""
        rows = self._entries.get(key)
        if rows is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return rows

    def peek(self, key: bytes) -> torch.Tensor:
        """Rows that are here, without counting. KeyError if they are not."""
        return self._entries[key]

    def put(self, key: bytes, rows: torch.Tensor) -> list[tuple[bytes, torch.Tensor]]:
        """Add rows; returns what had to go for them. They go first themselves if they are larger than the limit."""
        if key not in self._entries:
            self._entries[key] = rows
            self.bytes += rows.nbytes
            if key in self._held:
                self.held_bytes += rows.nbytes
        return self._trim(key)

    def _trim(self, newest: bytes) -> list[tuple[bytes, torch.Tensor]]:
        """Evict what nobody holds until the limit is kept: `newest` if it is too large to stay, or the least recently
        used."""
        gone = []
        while self.bytes > self.limit_bytes:
            free = (key for key in self._entries if key not in self._held)
            too_large = newest in self._entries and self._entries[newest].nbytes > self.limit_bytes
            key = newest if too_large and newest not in self._held else next(free, None)
            if key is None:
                break
            gone.append((key, self.pop(key)))
            self._evictions += 1
        return gone

    def pop(self, key: bytes) -> torch.Tensor:
        """Take rows out, held or not."""
        rows = self._entries.pop(key)
        self.bytes -= rows.nbytes
        if key in self._held:
            self.held_bytes -= rows.nbytes
        return rows

    def hold(self, key: bytes) -> None:
        """Count one more who needs the rows, whether or not they are here yet."""
        self._held[key] = self._held.get(key, 0) + 1
        if self._held[key] == 1 and key in self._entries:
            self.held_bytes += self._entries[key].nbytes

    def let_go(self, key: bytes) -> list[tuple[bytes, torch.Tensor]]:
        """Undo one `hold`; returns what goes now that it may. KeyError without a `hold`."""
        self._held[key] -= 1
        if self._held[key]:
            return []
        del self._held[key]
        if key in self._entries:
            self.held_bytes -= self._entries[key].nbytes
            self._entries.move_to_end(key)
        return self._trim(key)

    def holders(self, key: bytes) -> int:
        """How many hold the key."""
        return self._held.get(key, 0)

    def stats(self) -> TierStats:
        """Plain figures."""
        return TierStats(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            bytes=self.bytes,
            held_bytes=self.held_bytes,
            entries=len(self._entries),
        )


class EmbeddingCache:
    """The device's tier with the host's behind it. Not thread-safe.

    device_bytes: limit of the first; host_bytes: of the second, 0 for none (and there is none on a CPU).
    """

    def __init__(self, device: torch.device, *, device_bytes: int, host_bytes: int = 0) -> None:
        self.device = MemoryTier(device_bytes, device)
        self.host = None if device.type == "cpu" or not host_bytes else MemoryTier(host_bytes, torch.device("cpu"))

    def find(self, key: bytes) -> torch.Tensor | None:
        """The rows on the device, brought there from the host if that is where they are; None if they are nowhere."""
        rows = self.device.get(key)
        if rows is not None or self.host is None:
            return rows
        rows = self.host.get(key)
        if rows is None:
            return None
        self.host.pop(key)
        return self.add(key, rows)

    def add(self, key: bytes, rows: torch.Tensor) -> torch.Tensor:
        """Keep rows from any device; returns them on the cache's."""
        here = rows.to(self.device.device, non_blocking=True)
        self._pass_on(self.device.put(key, here))
        return here

    def rows(self, key: bytes) -> torch.Tensor:
        """Rows that are held and here. KeyError otherwise."""
        return self.device.peek(key)

    def hold(self, key: bytes) -> None:
        """Rows of `key` stay on the device once they are there, until as many calls of `let_go`."""
        self.device.hold(key)

    def holders(self, key: bytes) -> int:
        """How many hold the key."""
        return self.device.holders(key)

    def let_go(self, key: bytes) -> None:
        """Undo one `hold`."""
        self._pass_on(self.device.let_go(key))

    def drop(self, key: bytes) -> None:
        """Take rows off the device although somebody holds them; they go to the host if there is a tier."""
        self._pass_on([(key, self.device.pop(key))])

    def _pass_on(self, gone: list[tuple[bytes, torch.Tensor]]) -> None:
        if self.host is not None:
            for key, rows in gone:
                self.host.put(key, rows.cpu())
