"""A backend without a tower: rows that tell whose they are, workers that finish when told to, fail or die."""

from __future__ import annotations

from collections import deque

import torch

from tests.vision.fake_disk import FakeDisk
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EmbedShape, EncoderPool, PoolLimits
from vision.towers.temporal_patch import EncodeBatch, TemporalPatch
from vision.workers.backend import EncodeResult

EMBED_SHAPE = EmbedShape(merge=2, width=2, dtype=torch.int32)
ROW_BYTES = 8


def mark(digest: bytes) -> int:
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def rows_of(patch: TemporalPatch) -> torch.Tensor:
    """int32 [n, 2]: whose row, and which one."""
    h, w = patch.grid
    numbers = torch.arange(h * w // 4, dtype=torch.int32)
    return torch.stack((torch.full_like(numbers, mark(patch.digest)), numbers), dim=1)


class FakeBackend:
    """inline: a batch is finished by the next `collect`, as if the device's thread were always done by then; otherwise
    when a test says `finish`. cancels: whether batches can be cancelled.

    fail: digests whose batches fail, as often as the number says. handles: what `wait_handles` says.
    """

    has_work = takes_turns = False

    def __init__(self, workers: int = 1, *, inline: bool = True, cancels: bool = False) -> None:
        self.inline = inline
        self.cancels = cancels
        self.cancelled: list[int] = []
        self.usable = list(range(workers))
        self.queues: dict[int, deque[EncodeBatch]] = {number: deque() for number in self.usable}
        self.batches: list[tuple[int, EncodeBatch]] = []
        self.fail: dict[bytes, int] = {}
        self.results: list[EncodeResult] = []
        self.closed = False

    def workers(self) -> list[int]:
        return self.usable

    def start(self, worker: int, batch: EncodeBatch) -> None:
        self.queues[worker].append(batch)
        self.batches.append((worker, batch))

    def finish(self, worker: int = 0) -> None:
        batch = self.queues[worker].popleft()
        poisoned = [patch.digest for patch in batch.patches if self.fail.get(patch.digest, 0) > 0]
        for digest in poisoned:
            self.fail[digest] -= 1
        if poisoned:
            self.results.append(EncodeResult(number=batch.number, embeds=None, error="RuntimeError: poisoned"))
        else:
            rows = tuple(rows_of(patch) for patch in batch.patches)
            self.results.append(EncodeResult(number=batch.number, embeds=rows))

    def die(self, worker: int) -> None:
        """The first batch is the one it dies of."""
        for place, batch in enumerate(self.queues[worker]):
            self.results.append(EncodeResult(number=batch.number, embeds=None, error="died", untried=place > 0))
        self.queues[worker].clear()

    def cancel(self, worker: int, number: int) -> None:
        self.cancelled.append(number)
        batch = next((batch for batch in self.queues[worker] if batch.number == number), None)
        if self.cancels and batch is not None:
            self.queues[worker].remove(batch)
            self.results.append(EncodeResult(number=number, embeds=None, error="cancelled", untried=True))

    def work(self, budget_s: float) -> bool:
        return False

    def collect(self) -> list[EncodeResult]:
        if self.inline and self.queues[0]:
            self.finish(0)
        results, self.results = self.results, []
        return results

    def wait_handles(self) -> list[int]:
        return [] if self.inline else [0]

    def close(self) -> None:
        self.closed = True

    def encoded(self) -> list[bytes]:
        """The digests of all that was started, in order."""
        return [patch.digest for _, batch in self.batches for patch in batch.patches]


def make_pool(
    backend: FakeBackend,
    *,
    max_patches: int = 64,
    space_rows: int = 10_000,
    cache_rows: int | None = None,
    host_rows: int | None = None,
    disk: FakeDisk | None = None,
) -> EncoderPool:
    """cache_rows: as many as space_rows by default. host_rows: None for no such tier."""
    cpu = torch.device("cpu")
    device = MemoryTier((space_rows if cache_rows is None else cache_rows) * ROW_BYTES, cpu)
    host = None if host_rows is None else MemoryTier(host_rows * ROW_BYTES, cpu)
    limits = PoolLimits(
        max_patches=max_patches, space_bytes=space_rows * ROW_BYTES, batches_ahead=1 if backend.inline else 2
    )
    cache = EmbeddingCache(device, host)
    return EncoderPool(backend, cache, fingerprint=b"tower", embed_shape=EMBED_SHAPE, limits=limits, disk=disk)
