"""Where a media worker starts. Imported in milliseconds: from then on, and so while torch is still being imported, the
process listens to its parent and dies with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlmserve_common.process.child import Parent


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaWorkerSettings:
    """What a worker is told when it starts.

    processor: pickled (class, config, limits), since they cannot be read before torch is there. shared_dir: an existing
    private directory for `SharedArrays`, on tmpfs.
    """

    processor: bytes
    shared_dir: Path


def start_worker(parent: Parent, settings: MediaWorkerSettings) -> None:
    """See `processors.pool.worker.run_worker`."""
    from processors.pool.worker import run_worker

    run_worker(parent, settings)
