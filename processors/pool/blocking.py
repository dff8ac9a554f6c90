"""A `MediaMaker` for threads that wait. To go with the pool's threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from processors.knobs import ImageKnobs
from processors.pool.maker import MediaMaker
from processors.processed import ProcessedImage, ProcessedVideo
from processors.video.options import VideoKnobs


class BlockingMaker:
    """See `MediaMaker`. Thread-safe."""

    def __init__(self, maker: MediaMaker) -> None:
        self._maker = maker
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="media-loop", daemon=True)
        self._thread.start()

    def picture(self, data: bytes, knobs: ImageKnobs) -> ProcessedImage:
        """See `MediaMaker`."""
        return asyncio.run_coroutine_threadsafe(self._maker.picture(data, knobs), self._loop).result()

    def clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        """See `MediaMaker`."""
        return asyncio.run_coroutine_threadsafe(self._maker.clip(data, knobs), self._loop).result()

    def frames(self, files: Sequence[bytes], knobs: VideoKnobs) -> ProcessedVideo:
        """See `MediaMaker`."""
        return asyncio.run_coroutine_threadsafe(self._maker.frames(files, knobs), self._loop).result()

    def close(self) -> None:
        """See `MediaMaker`."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._maker.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
