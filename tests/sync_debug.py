"""On a real GPU: whatever waits for it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits() -> Iterator[None]:
    """In it torch raises where an operator or a copy would wait for the GPU. Waiting for an event is allowed, as is
    what does not go through torch."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
