"""To be deleted with the first `ProcessMaker` that is asynchronous by itself."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from processors.pool.maker import ThreadMaker


class ProcessThreads(ThreadMaker):
    """See `MediaMaker`: a thread waits for each process."""

    def __init__(self, processes: Any, count: int) -> None:
        self._direct = self._processes = processes
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="media-process")

    async def close(self) -> None:
        """See `MediaMaker`."""
        await asyncio.to_thread(self._processes.close)
        await super().close()
