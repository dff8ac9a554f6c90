"""What media workers, and a server's other processes, are forks of. Needs none of the libraries that they do."""

from __future__ import annotations

from vlmserve_common.process.child import prepare_forks


def prepare_processes() -> None:
    """Let the process start that children are forks of, so that these are there at once later on. Never blocks."""
    prepare_forks(["processors.pool.preload"])
