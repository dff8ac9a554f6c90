"""A disk tier without threads: what was begun ends when a test says so, well or badly."""

from __future__ import annotations

from collections import deque

import torch

from vision.cache.disk_tier import Done, Loaded, Saved
from vision.cache.stats import TierStats


class FakeDisk:
    """See `DiskTier`. rows: what is on the disk, by key; pinned: which of it for good. broken: nothing can be saved."""

    def __init__(self) -> None:
        self.rows: dict[bytes, torch.Tensor] = {}
        self.pinned: set[bytes] = set()
        self.loads: deque[bytes] = deque()
        self.saves: deque[tuple[int, bytes, torch.Tensor, bool, bool]] = deque()
        self.broken = False
        self.saving = 0
        self.closed = False
        self._done: list[Done] = []
        self._number = 0

    def load(self, key: bytes) -> None:
        self.loads.append(key)

    def save(self, key: bytes, rows: torch.Tensor, *, insist: bool = False, pin: bool = False) -> int:
        self.saving += 1
        self._number += 1
        self.saves.append((self._number, key, rows, insist, pin))
        return self._number

    def finish_load(self) -> None:
        key = self.loads.popleft()
        self._done.append(Loaded(key=key, embeds=self.rows.get(key)))

    def finish_save(self) -> None:
        number, key, rows, _, pin = self.saves.popleft()
        new = not self.broken and key not in self.rows
        if not self.broken:
            self.rows[key] = rows
            self.pinned |= {key} if pin else set()
        self._done.append(Saved(number=number, key=key, ok=not self.broken, new=new))

    def finish_all(self) -> None:
        while self.loads:
            self.finish_load()
        while self.saves:
            self.finish_save()

    def collect(self) -> list[Done]:
        done, self._done = self._done, []
        self.saving -= sum(isinstance(one, Saved) for one in done)
        return done

    def wait_handle(self) -> int:
        return 99

    def stats(self) -> TierStats:
        return TierStats(entries=len(self.rows))

    def close(self) -> None:
        self.closed = True
