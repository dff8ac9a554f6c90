"""Loads many media at a time. Each one succeeds or fails for itself."""

from vlmserve_common.process.child import prepare_forks


def prepare_processes() -> None:
    """Start the process that media workers, and a server's other processes, are forked from. Never blocks.

    It imports this package's libraries, so that later forks need not. The caller imports none of them.
    """
    prepare_forks(["processors.pool.preload"])
