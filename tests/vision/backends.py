"""A backend of fake workers, and waiting for results of any backend by its handles."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from tests.vision.fake_worker import fake_worker
from tests.vision.patches import make_patch
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncoderBackend, EncodeResult
from vision.workers.process_backend import ProcessBackend
from vision.workers.settings import WorkerSettings

PATIENCE_S = 60.0


class Fakes:
    """A backend of fake workers, one a plan (see `fake_worker`)."""

    def __init__(
        self, folder: Path, *plans: str, clock: Callable[[], float] = time.monotonic, **settings: object
    ) -> None:
        self.folder = folder
        self.shared_dir = folder / "shared"
        self.shared_dir.mkdir(exist_ok=True)
        devices = [f"cuda:{number}" for number in range(len(plans))]
        for device, plan in zip(devices, plans, strict=True):
            (folder / device).write_text(plan)
        options = {"model": folder, "devices": tuple(devices), "shared_dir": self.shared_dir} | settings
        self.backend = ProcessBackend(WorkerSettings(**options), fake_worker, clock=clock)

    def pids(self) -> list[int]:
        path = self.folder / "pids"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def collect(backend: EncoderBackend, count: int) -> list[EncodeResult]:
    """`count` results, in the order in which they come."""
    results: list[EncodeResult] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(results) < count:
        assert wait(list(backend.wait_handles()), deadline - time.monotonic()), f"{len(results)} of {count} in time"
        results += backend.collect()
    assert len(results) == count, results
    return results


def make_batch(number: int, *grids: tuple[int, int], order: float | None = None, width: int = 1) -> EncodeBatch:
    """Noise; order: the first pixel, which tells a fake worker what to do."""
    patches = tuple(make_patch(grid, width, seed=number) for grid in grids or [(2, 2)])
    if order is not None:
        patches[0].pixels[0, 0] = order
    return EncodeBatch(number=number, patches=patches)


def assert_done(result: EncodeResult, of: EncodeBatch) -> None:
    """Assert that a fake worker has done a batch."""
    assert (result.number, result.error, result.untried) == (of.number, "", False)
    for rows, patch in zip(result.embeds, of.patches, strict=True):
        np.testing.assert_array_equal(rows.numpy(), patch.pixels)
