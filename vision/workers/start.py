"""The start of an encoder worker. It imports in milliseconds, so the process listens to its parent, and dies with it,
while torch is still being imported."""

from __future__ import annotations

from vision.workers.settings import WorkerSettings
from vlmserve_common.process.child import Parent


def start_worker(parent: Parent, settings: WorkerSettings, device: str) -> None:
    """Import and run `vision.workers.encoder_worker.run_worker`."""
    from vision.workers.encoder_worker import run_worker

    run_worker(parent, settings, device)
