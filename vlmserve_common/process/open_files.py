"""How many files and connections this process may have open."""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Let this process and its children have as many as they may without asking anybody; returns how many that are.

    The soft limit is 1024 on most systems, for the sake of programs that use select(); nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_files_limit() -> int:
    """How many they are now."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft
